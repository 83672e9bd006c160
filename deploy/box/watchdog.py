"""The watch over a box: a process that removes it as soon as whoever made it lets go, by its end or by any death.

It reads a pipe whose other end only the maker holds. The end of the pipe means: remove the box. A byte means: the box
stays, until `python -m deploy.box down`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.box.removal import remove

ROOT = Path(__file__).resolve().parents[2]


class Remover:
    """The maker's side."""

    def __init__(self, number: int) -> None:
        self._number, self._kept = number, False
        # A session of its own: Ctrl-C in a terminal must not end it before its work is done.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.box", "watch", str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> bool:
        """Has the box removed, and returns True when it is; False for one that is kept."""
        if self._kept:
            return False
        self._let_go(b"")
        if self._process.returncode:
            remove(self._number)
        return True

    def keep(self) -> None:
        """Leaves the box running for good."""
        self._let_go(b"k")
        self._kept = True

    def _let_go(self, last: bytes) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write(last)
        self._process.stdin.close()
        self._process.wait()


def watch(number: int) -> None:
    """The watch itself: waits for its standard input, then removes the box or lets it be."""
    if not sys.stdin.buffer.read(1):
        remove(number)
