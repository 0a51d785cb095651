"""The import arrows of docs/architecture.md: who may import whom, read from the source with ``ast``."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("bench", "numerics_tests", "gem_model", "mxfp8", "kernels")

# For each package, the packages of ours that it must not import: everything above it in
#   bench, numerics_tests -> gem_model -> mxfp8 -> kernels
# `mxfp8.kernels` counts as `kernels`, and mxfp8 reaches it by name only, through dispatch.
FORBIDDEN = {
    "kernels": {"bench", "numerics_tests", "gem_model", "mxfp8"},
    "mxfp8": {"bench", "numerics_tests", "gem_model", "kernels"},
    "gem_model": {"bench", "numerics_tests", "kernels"},
    "numerics_tests": set(),
    "bench": set(),
}

# Inside mxfp8: the modules that may be imported by a module, for those whose place is fixed.
LEAVES = ("formats", "metrics", "report", "rng", "health", "traces")
LAYERS: tuple[tuple[str, ...], ...] = (  # lower layers first; a module imports only from layers below its own
    LEAVES,
    ("tensor",),
    ("reference", "observe"),
    ("dispatch",),
    ("ops", "recipe", "coalesce"),
    ("weight_cache", "rules", "modes", "te", "tuning", "grouped_ops"),
    ("linear", "grouped", "attention", "activations", "distributed", "drift", "optim", "fused", "epilogue", "producers",
     "mlp"),
    ("policies",),
    ("policy",),
    ("description",),
    ("audit",),
    ("cli",),
)  # fmt: skip


def imports_of(source: str, package: str) -> set[str]:
    """Dotted names that a module imports, also inside functions; ``package`` resolves relative imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def owners(names: set[str]) -> set[str]:
    """Which of our packages the dotted names belong to."""
    kernels = {"kernels" for name in names if name == "mxfp8.kernels" or name.startswith("mxfp8.kernels.")}
    rest = {name.split(".")[0] for name in names if not name.startswith("mxfp8.kernels")}
    return kernels | (rest & set(PACKAGES))


def modules(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def upward(package: str, source: str, dotted: str) -> set[str]:
    """The forbidden packages that a source text of ``package`` imports."""
    return owners(imports_of(source, dotted)) & FORBIDDEN[package]


def dotted_package(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).parent.parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_upward_import_between_packages(repo_root: Path, package: str) -> None:
    paths = modules(repo_root, package)
    assert paths, f"{package}/ holds no Python file"
    bad = {
        str(path.relative_to(repo_root)): found
        for path in paths
        if (found := upward(package, path.read_text(), dotted_package(repo_root, path)))
    }
    assert not bad, f"upward imports: {bad}"


def layer_of(module: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if module in layer), None)


def upward_inside_mxfp8(module: str, source: str, dotted: str) -> set[str]:
    """Modules of mxfp8 in the same or a higher layer that ``module`` imports (its own package excepted)."""
    mine = layer_of(module)
    if mine is None:
        return set()
    named = {name.split(".")[1] for name in imports_of(source, dotted) if name.startswith("mxfp8.")}
    return {
        other
        for other in named - {module}
        if (its := layer_of(other)) is not None and its >= mine and not _same_layer_allowed(module, other)
    }


def _same_layer_allowed(module: str, other: str) -> bool:
    """attention, linear and their like share a layer and may use each other; leaves may not."""
    return module not in LEAVES and layer_of(module) == layer_of(other) and layer_of(module) == layer_of("linear")


def test_no_upward_import_inside_mxfp8(repo_root: Path) -> None:
    bad = {}
    for path in modules(repo_root, "mxfp8"):
        parts = path.relative_to(repo_root / "mxfp8").parts
        module = parts[0].removesuffix(".py")
        found = upward_inside_mxfp8(module, path.read_text(), dotted_package(repo_root, path))
        if found:
            bad["/".join(parts)] = found
    assert not bad, f"upward imports inside mxfp8: {bad}"


def test_every_module_of_mxfp8_has_a_place(repo_root: Path) -> None:
    """A new module must be given its layer here; ``policies`` and the like would otherwise escape the check."""
    found = {p.stem if p.is_file() else p.name for p in (repo_root / "mxfp8").iterdir() if _is_module(p)}
    assert found <= {name for layer in LAYERS for name in layer}, "give the new module a layer in LAYERS"


def _is_module(path: Path) -> bool:
    if path.name.startswith("__"):
        return False
    return path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("kernels", "from mxfp8 import tensor"),
        ("mxfp8", "def f():\n    import mxfp8.kernels.gemm_triton"),
        ("mxfp8", "from .kernels import gemm_triton"),
        ("mxfp8", "from gem_model.model import GEM"),
        ("gem_model", "from numerics_tests import tolerances"),
    ],
)
def test_the_check_sees_an_upward_import(package: str, source: str) -> None:
    assert upward(package, source, package)


def test_the_check_sees_an_upward_import_inside_mxfp8() -> None:
    assert upward_inside_mxfp8("formats", "from mxfp8.tensor import MXTensor", "mxfp8") == {"tensor"}
    assert upward_inside_mxfp8("ops", "from .linear import MXFP8Linear", "mxfp8") == {"linear"}
    assert upward_inside_mxfp8("reference", "from mxfp8 import dispatch", "mxfp8.reference") == {"dispatch"}
    assert upward_inside_mxfp8("linear", "from mxfp8 import ops, recipe", "mxfp8") == set()


def test_import_needs_neither_triton_nor_an_initialised_gpu() -> None:
    """In a fresh process in which triton cannot be imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import mxfp8, mxfp8.kernels, gem_model, torch\n"
        "assert not torch.cuda.is_initialized(), 'importing mxfp8 initialised CUDA'\n"
        "heavy = [m for m in ('matplotlib.pyplot', 'torchao') if m in sys.modules]\n"
        "assert not heavy, f'importing mxfp8 also imported {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
