"""The examples run as they stand, stay short, and show what their first line promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 60


def run(root: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), env.get("PYTHONPATH"))))
    command = [sys.executable, str(root / "examples" / name), *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_each_example_is_short_and_run_below(repo_root: Path) -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in (repo_root / "examples").glob("*.py")}
    assert set(found) == {"wrap_linear.py", "audit_model.py", "certify_backend.py"}
    assert max(found.values()) < MAX_LINES


def test_wrap_linear(repo_root: Path) -> None:
    done = run(repo_root, "wrap_linear.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"body\.0\s+MXFP8Linear .*mxfp8_rceil", done.stdout)
    assert re.search(r"head\s+Linear .*bf16 .*prediction head", done.stdout)
    losses = re.findall(r"BF16 (\d\.\d+)   MXFP8 (\d\.\d+)", done.stdout)
    assert len(losses) == 4
    # ln 2 is what a model that knows nothing pays; both runs have learnt, and differ by less than they learnt.
    learnt = [0.6931 - float(loss) for loss in losses[-1]]
    assert min(learnt) > 0.05
    assert abs(learnt[0] - learnt[1]) < 0.1 * min(learnt)


def test_audit_model(repo_root: Path) -> None:
    done = run(repo_root, "audit_model.py")
    assert done.returncode == 0, done.stderr
    assert "kept in BF16: spiky" in done.stdout
    assert re.search(r"spiky\s+Linear .*bf16 .*rule 0", done.stdout)


def test_certify_backend(repo_root: Path) -> None:
    done = run(repo_root, "certify_backend.py", "reference")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == 3
    assert done.stdout.endswith("backend 'reference' on cpu: certified\n")


def test_certify_backend_refuses_one_that_cannot_run(repo_root: Path) -> None:
    done = run(repo_root, "certify_backend.py", "blackwell")
    assert done.returncode == 1
    assert "no certificate: quantize: backend 'blackwell' cannot run on cpu" in done.stderr
    assert "certified" not in done.stdout
