"""The end of a box: by its number alone, whoever made it and however far that came; and the process that sees to it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.box.network import kill_processes, remove_network
from deploy.box.servers import quit_postgres

FOLDERS = Path("/var/lib/autotune-box")


def folder_of(number: int) -> Path:
    """Where a box keeps logs, data and settings."""
    return FOLDERS / str(number)


def fresh_folder(number: int) -> Path:
    """Makes it, with a folder of logs. One that a box before the last start of this machine left is removed."""
    folder = folder_of(number)
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "logs").mkdir(parents=True)
    return folder


def remove(number: int) -> None:
    """Ends every process in the box, then removes its folder and network. Safe to repeat, also at the same time."""
    with _one_at_a_time():
        quit_postgres(number, folder_of(number) / "postgres")
        kill_processes(number)
        if folder_of(number).exists():
            shutil.rmtree(folder_of(number))
        remove_network(number)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """A box that ends, the watch of one that was killed, and `deploy.box down` may want to remove it at once."""
    FOLDERS.mkdir(parents=True, exist_ok=True)
    folders = os.open(FOLDERS, os.O_RDONLY)
    try:
        fcntl.flock(folders, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folders)


ROOT = Path(__file__).resolve().parents[2]


class Remover:
    """A process that removes a box as soon as whoever made it lets go, by its end or by any death: the maker's side.

    It reads a pipe whose other end only the maker holds. The end of the pipe means: remove the box. A byte means: the
    box stays, until `python -m deploy.box down`.
    """

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
