"""The skip policy of tests/conftest.py, tried on a small suite in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CONFIG = "[pytest]\nmarkers =\n    gpu: g\n    shared: s\n    netns: n\n"
SUITE = """
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("no reason that counts")

@pytest.mark.shared
def test_needs_shared():
    pass

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
"""
MODULE_SKIP = "import pytest\npytest.importorskip('a_module_that_nobody_has')\n"


def run_suite(folder: Path, *, ci: str, **files: str) -> str:
    tests = folder / "clone" / "tests"
    tests.mkdir(parents=True)
    for name in ("conftest.py", "commands.py"):
        shutil.copy(CONFTEST.parent / name, tests / name)
    (folder / "clone" / "pytest.ini").write_text(CONFIG)
    for name, text in files.items():
        (tests / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=folder / "clone",
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "summary"),
    [("", "1 passed, 2 skipped, 1 xfailed"), ("true", "1 failed, 1 passed, 1 skipped, 1 xfailed")],
)
def test_a_skip_is_a_failure_only_in_ci_and_only_without_a_good_reason(tmp_path: Path, ci: str, summary: str) -> None:
    assert run_suite(tmp_path, ci=ci, test_suite=SUITE).startswith(summary)


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "summary"), [("", "1 skipped"), ("true", "1 error")])
def test_a_whole_module_may_not_be_skipped_in_ci(tmp_path: Path, ci: str, summary: str) -> None:
    assert run_suite(tmp_path, ci=ci, test_suite=MODULE_SKIP).startswith(summary)
