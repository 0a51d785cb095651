"""The portable kernels on a CPU, in Triton's interpreter: on before kernels are imported, so in other processes."""

import importlib.util

import pytest

from numerics_tests.interpreted.processes import GROUPS, Processes


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str, interpreted: Processes) -> None:
    status, printed = interpreted.result(group)
    assert status == 0, printed[-6000:]
    assert " passed" in printed
