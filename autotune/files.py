"""Files that are written whole or not at all, whatever becomes of the process that writes them."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What SQLite keeps beside a file while it is written.
_BESIDE = ("", "-wal", "-shm", "-journal")
_PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")


@contextmanager
def whole_file(target: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Gives an empty file beside the target, which takes the target's place at the end, unless an error passes.

    What a killed process left of an earlier try is removed first. Two that write the same target take turns.

    Args:
        target: of a folder that can be written; a link would be replaced, not followed.
        mode: permissions of the new file, less the umask's.

    Raises:
        OSError: it cannot be written.
    """
    with _turn(target):
        for left in _parts(target):
            left.unlink(missing_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield part
            part.replace(target)
        finally:
            for suffix in _BESIDE:
                Path(f"{part}{suffix}").unlink(missing_ok=True)


def is_part(path: Path) -> bool:
    """Whether a file is called like one that was never finished."""
    return _PART.fullmatch(path.name) is not None


def _parts(target: Path) -> list[Path]:
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.part({'|'.join(_BESIDE)})")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """Holds a lock on the target, of which the kernel lets go when this process ends."""
    lock = target.with_name(f".{target.name}.lock")
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, lock):  # whoever had it before may have removed it
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
