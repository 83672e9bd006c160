"""The end of a box: by its number alone, whoever made it and however far that came."""

from __future__ import annotations

import fcntl
import os
import shutil
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
