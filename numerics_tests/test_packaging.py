"""What pip installs: ``kernels/`` under the name ``mxfp8.kernels``, every package of the tree, and nothing else."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

INSTALLED_ROOTS = ("mxfp8", "gem_model", "numerics_tests")


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict[str, object]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_names(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names inside the wheel, built from a copy of the tree so that no build folder is left in the checkout."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel without a registry needs setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "kernels", *INSTALLED_ROOTS):
        _copy(repo_root / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    code = f"import setuptools.build_meta as b; print(b.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def _copy(source: Path, target: Path) -> None:
    paths = [p for p in source.rglob("*") if p.suffix in (".py", ".typed")] if source.is_dir() else [source]
    for path in paths:
        place = target / path.relative_to(source) if source.is_dir() else target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())


def test_wheel_has_no_top_level_kernels(wheel_names: list[str]) -> None:
    """`kernels` is the import name of another well-known package."""
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(INSTALLED_ROOTS)


def test_wheel_holds_every_module_and_type_marker(repo_root: Path, wheel_names: list[str]) -> None:
    expected = {
        p.relative_to(repo_root).as_posix() for root in INSTALLED_ROOTS for p in (repo_root / root).rglob("*.py")
    }
    expected |= {f"mxfp8/kernels/{p.name}" for p in (repo_root / "kernels").glob("*.py")}
    expected |= {"mxfp8/py.typed", "gem_model/py.typed"}
    assert expected == {name for name in wheel_names if ".dist-info/" not in name}


def test_package_list_equals_the_tree(repo_root: Path, project: dict[str, object]) -> None:
    """The list in pyproject.toml is written by hand, because kernels/ is mapped to another name."""
    found = {
        ".".join(p.parent.relative_to(repo_root).parts)
        for r in INSTALLED_ROOTS
        for p in (repo_root / r).rglob("__init__.py")
    }
    listed = project["tool"]["setuptools"]["packages"]  # type: ignore[index]
    assert set(listed) == found | {"mxfp8.kernels"}


def test_installed_kernels_package_is_the_folder(repo_root: Path) -> None:
    """In a process started outside the checkout, as a user's would be."""
    code = (
        "import mxfp8.kernels as k, importlib.util as u; print(k.__file__); "
        "assert u.find_spec('kernels') is None, u.find_spec('kernels')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `pip install -e .` first\n{done.stderr}"
    assert Path(done.stdout.strip()) == repo_root / "kernels" / "__init__.py"


def test_commands_point_at_what_exists(project: dict[str, object]) -> None:
    scripts = project["project"]["scripts"]  # type: ignore[index]
    for command, target in scripts.items():
        module, attribute = target.split(":")
        assert importlib.util.find_spec(module) is not None, f"{command}: no module {module}"
        assert callable(getattr(importlib.import_module(module), attribute)), f"{command}: {target} is not callable"


def test_version_is_stated_once(project: dict[str, object]) -> None:
    assert importlib.metadata.version("mxfp8") == project["project"]["version"]  # type: ignore[index]


def test_torch_is_no_build_requirement(project: dict[str, object]) -> None:
    requires = project["build-system"]["requires"]  # type: ignore[index]
    assert [r for r in requires if not r.startswith("setuptools")] == []


def test_constraints_pin_every_requirement_of_demo_and_test(repo_root: Path, project: dict[str, object]) -> None:
    """The CPU set is exact: an unpinned requirement would drift between two runs of CI."""
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (repo_root / "constraints" / "cpu.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    table = project["project"]
    extras = table["optional-dependencies"]  # type: ignore[index]
    wanted = [*table["dependencies"], *extras["test"], *extras["dev"], *extras["triton"]]  # type: ignore[index]
    names = {requirement.split(">")[0].split("=")[0].lower().replace("_", "-") for requirement in wanted}
    assert names <= pinned, f"not pinned in constraints/cpu.txt: {sorted(names - pinned)}"
