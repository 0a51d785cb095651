"""Which backend runs: the table is complete, a named one runs or says why not, and ``auto`` records its choice."""

import importlib
import inspect
import subprocess
import sys
from unittest import mock

import pytest
import torch

import mxfp8
from mxfp8 import dispatch
from numerics_tests.conftest import takes_a_backend

CELLS = [(op, backend) for op in dispatch.OPS for backend in dispatch.BACKENDS]


def test_explain_covers_every_op_and_backend(device: torch.device) -> None:
    rows = dispatch.explain(device)
    assert [(r.op, r.backend) for r in rows] == CELLS
    for r in rows:
        assert r.device == device.type
        assert r.available == (r.reason == "")
        assert mxfp8.is_available(r.op, r.backend, device, return_reason=True) == (r.available, r.reason)
        assert mxfp8.is_available(r.op, r.backend, device) == r.available
        assert r.backend != "reference" or r.available


@pytest.mark.parametrize("op, backend", CELLS)
def test_a_named_backend_runs_or_says_why_not(op: str, backend: str, device: torch.device) -> None:
    reason = dispatch.why_not(op, backend, device)
    if reason is None:
        assert callable(dispatch.resolve(op, backend, device))
        return
    with pytest.raises(RuntimeError, match=f"{op}: backend '{backend}' cannot run on {device.type}") as raised:
        dispatch.resolve(op, backend, device)
    assert reason in str(raised.value)
    assert "Usable here: " in str(raised.value)
    assert "reference" in str(raised.value).split("Usable here: ")[1]


@pytest.mark.parametrize("op, backend", CELLS)
def test_every_backend_has_the_signature_of_the_reference(op: str, backend: str) -> None:
    """Whether it can run here or not: a kernel's function is there wherever Triton is."""
    module = dispatch._module(op, backend)
    if backend == "reference" or importlib.util.find_spec(module) is None:
        return
    pytest.importorskip("triton", reason="tests of Triton kernels")
    function, contract = getattr(importlib.import_module(module), op), dispatch._functions[op, "reference"]
    ours, reference = (list(inspect.signature(f).parameters.values()) for f in (function, contract))
    described = [(p.name, p.kind, p.default) for p in ours]
    assert described[: len(reference)] == [(p.name, p.kind, p.default) for p in reference]
    # What a backend can do beyond the contract is asked for by name, and is off by default.
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in ours[len(reference) :])


def test_auto_takes_the_first_that_can_run_and_records_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_chosen", {})
    for op in dispatch.OPS:
        if device.type == "cuda" and not any(mxfp8.is_available(op, b, device) for b in dispatch.BACKENDS[:-1]):
            with pytest.warns(UserWarning, match=f"{op} on CUDA takes the plain-torch reference"):
                dispatch.resolve(op, "auto", device)
        dispatch.resolve(op, "auto", device)
        first = next(b for b in dispatch.BACKENDS if mxfp8.is_available(op, b, device))
        assert dispatch.chosen()[op, device.type] == first
    if device.type == "cpu":
        assert set(dispatch.chosen().values()) == {"reference"}
    dispatch.chosen().clear()  # a copy
    assert dispatch.chosen()


def test_ops_take_the_backend_by_name() -> None:
    x = torch.randn(4, 64)
    q = mxfp8.quantize(x, backend="reference")
    assert torch.equal(mxfp8.gemm(q, q, backend="reference"), mxfp8.gemm(q, q))
    assert torch.equal(mxfp8.hadamard(x, backend="reference"), mxfp8.hadamard(x))
    if mxfp8.is_available("quantize", "blackwell", "cpu"):
        pytest.fail("a CPU is no Blackwell GPU")
    with pytest.raises(RuntimeError, match="quantize: backend 'blackwell' cannot run on cpu"):
        mxfp8.quantize(x, backend="blackwell")


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: dispatch.why_not("softmax", "reference"), "unknown op 'softmax': use one of quantize, "),
        (lambda: dispatch.why_not("gemm", "cudnn"), "unknown backend 'cudnn': use 'auto' or one of blackwell, "),
        (lambda: dispatch.resolve("gemm", "cudnn", torch.device("cpu")), "unknown backend 'cudnn'"),
        (lambda: mxfp8.is_available("gemm", ""), "unknown backend ''"),
    ],
)
def test_unknown_names_are_refused_with_the_choices(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_the_table_prints_from_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "mxfp8.dispatch"], capture_output=True, text=True, check=True)
    for name in (*dispatch.OPS, *dispatch.BACKENDS, "available", "reason"):
        assert name in done.stdout


def test_which_tests_count_as_tests_of_a_gpu() -> None:
    """Those with the name of a backend among their parameters, wherever it stands."""
    several = ({"plain": "hopper", "shape": (1, 2)}, {"backend": "reference"}, {"recipe": "mxfp8_rceil"}, {"k": 32})
    found = [takes_a_backend(mock.Mock(callspec=mock.Mock(params=params))) for params in several]
    assert found == [True, True, False, False]
    assert not takes_a_backend(mock.Mock(spec=[]))
