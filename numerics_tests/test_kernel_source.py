"""What reading the kernels' source can find: faults that show only for arguments a test rarely has."""

import ast
import importlib.util
from pathlib import Path

import pytest

KERNELS = Path(importlib.util.find_spec("mxfp8.kernels").origin).parent  # type: ignore[union-attr, arg-type]


def _is_jit(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Attribute) and node.attr == "jit"


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda p: p.stem)
def test_no_kernel_calls_a_method_of_an_integer_argument(path: Path) -> None:
    """An argument that is 1 reaches a kernel as a Python int, which has no ``.to``: such a kernel compiles for every
    shape but those. ``do_not_specialize`` exempts it."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not any(_is_jit(d) for d in function.decorator_list):
            continue
        sizes = {a.arg for a in function.args.args if a.arg.isupper() and a.annotation is None}
        sizes -= {str(c.value) for d in function.decorator_list for c in ast.walk(d) if isinstance(c, ast.Constant)}
        called = {
            n.value.id
            for n in ast.walk(function)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.attr in ("to", "shape", "dtype")
        }
        assert not sizes & called, f"{function.name}: {sorted(sizes & called)}"
