"""The CPU as a device on which calls are recorded and replayed, see :mod:`mxfp8.dispatch.replays`. Kernels are
played by functions of addresses."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from mxfp8.kernels import _launch, _replay

from mxfp8.dispatch import replays

__all__ = ["forgotten", "outside", "recorded"]

T = TypeVar("T")


def outside(f: Callable[[], T]) -> T:
    """A kernel's own work, which dispatch modes do not see."""
    with torch.utils._python_dispatch._disable_current_modes():
        return f()


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """No call was seen before."""
    patch.setattr(replays, "_seen", {})
    patch.setattr(replays, "_replays", {})


def recorded(patch: pytest.MonkeyPatch, device: Callable[[], int | None] = lambda: None) -> None:
    """Calls on CPU tensors are recorded. ``device``: the index of the current one, None for a CPU's."""
    forgotten(patch)
    patch.setattr(replays, "_RECORDED", ("cpu",))
    patch.setattr(_launch, "_DIRECT", True)
    patch.setattr(_launch, "allocate", torch._C._dynamo.guards._empty_strided_cpu)
    for module in (_launch, _replay):
        patch.setattr(module, "_get_device", device)
        patch.setattr(module, "_get_stream", lambda index: "stream")
