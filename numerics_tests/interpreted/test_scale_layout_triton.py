"""The kernels of the tiled scale layout in Triton's interpreter: the same tests as the plain torch form."""

import pytest
import torch

pytest.importorskip("triton", reason="tests of Triton kernels")
from mxfp8.kernels import scale_layout as layout
from mxfp8.kernels._device import INTERPRETED

from numerics_tests.test_scale_layout import *  # noqa: F403
from numerics_tests.test_scale_layout import check_quantize_tiled

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 before pytest starts")


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = layout._copy
    monkeypatch.setattr(layout, "_copy", lambda *args: (calls.append(args), real(*args)))
    scale = torch.ones(3, 5, dtype=torch.uint8)
    tiled = layout.to_tiled(scale)
    layout.from_tiled(tiled, 3, 5)
    ends = torch.tensor([0, 3])
    layout.from_tiled_jagged(layout.to_tiled_jagged(scale, ends)[0], ends, 3, 5)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (130, 150), (128, 128), (2, 129, 300), (257, 33)], ids=str)
def test_quantising_straight_into_tiles_interpreted(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_quantize_tiled(shape, dtype, torch.device("cpu"))
