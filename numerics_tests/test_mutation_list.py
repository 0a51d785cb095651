"""The list of planted faults stays usable: each still fits its file, names a test that exists, and is in the table."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from numerics_tests.mutation import run
from numerics_tests.mutation.faults import Fault
from numerics_tests.mutation.run import FAULTS


def test_there_are_enough_and_names_are_unique() -> None:
    assert len(FAULTS) >= 40
    assert not [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file_and_names_a_test(fault: Fault, repo_root: Path) -> None:
    faulty = fault.planted(repo_root)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse((repo_root / fault.file).read_text()))
    file, name = fault.test.split("::")
    assert re.search(rf"^def {name}\(", (repo_root / file).read_text(), flags=re.MULTILINE)


def test_text_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    fault = Fault(name="twice", file="a.py", old="x = 1", new="x = 2", test="t.py::test_t", why="")
    with pytest.raises(ValueError, match="'twice': its text stands 2 times"):
        fault.planted(tmp_path)


def test_the_table_is_that_of_the_list(repo_root: Path) -> None:
    outcomes = [run.Outcome(fault=fault, status="caught", detail="", seconds=0.0) for fault in FAULTS]
    assert (repo_root / "docs" / "mutations.md").read_text() == run.table(outcomes)


@pytest.mark.parametrize(
    "code, output, status",
    [
        (0, "3 passed in 1s", "survived"),
        (0, "3 skipped in 1s", "error"),
        (1, "FAILED a.py::test_b[1] - assert 1 == 2", "caught"),
        (1, "FAILED a.py::test_b[1] - NameError: name 'q' is not defined", "error"),
        (1, "Traceback (most recent call last):\nImportError: no", "error"),
        (2, "ERROR a.py\nInterrupted: 1 error during collection", "error"),
        (-1, "timed out", "error"),
    ],
)
def test_only_a_failing_test_is_a_catch(code: int, output: str, status: str) -> None:
    assert run._judge(code, output)[0] == status


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--only", "no_such_fault"])
    assert "unknown fault 'no_such_fault'" in capsys.readouterr().err
