"""Processes of a test that begin their work together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# Each process says that it is ready and then waits for the others: they start together.
TOGETHER = "import sys; from store_records import *; from storage import open_store; url = sys.argv[1]\n"
READY = "print('ready', flush=True); sys.stdin.readline()\n"


def run_together(script: str, url: str, count: int) -> list[str]:
    """Runs processes that start at once; gives what each wrote. Their second argument counts from 1."""
    running = [start(script, url, str(number + 1)) for number in range(count)]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0] * count, ends
    return [output.strip() for output, _ in ends]


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that has said that it is ready."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=TESTS, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(process.communicate()[1])
    return process
