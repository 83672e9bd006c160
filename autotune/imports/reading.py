"""One file in one of the formats, as what can be stored. All or nothing of a file, but for what its notes name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from io import BytesIO
from pathlib import Path

from autotune.backtest.runs import Clusters
from autotune.errors import InputError
from autotune.imports import deepspeed, history, megatron, nanotron, nccl, torchtitan
from autotune.imports.assembly import Stated, run_of
from autotune.imports.logs import MAX_LINE_BYTES, Content, LogFile, TrainingLog
from autotune.specs import ModelSpec
from autotune.specs.imported import OWN_SOURCES, ImportBatch, ImportedReading, ImportedRun

_PIECE_BYTES = 1 << 20


class Format(StrEnum):
    """What a file is."""

    CSV = "csv"
    NCCL_TESTS = "nccl-tests"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    NANOTRON = "nanotron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What a file holds, and notes for the user on what was left out and why.

    `runs` can be gone through again and again; where there are many, they are read from the file each time.
    """

    runs: Iterable[ImportedRun] = ()
    run_count: int = 0
    readings: Sequence[ImportedReading] = ()
    notes: Sequence[str] = ()


_READERS: dict[Format, Callable[[LogFile], TrainingLog]] = {
    Format.MEGATRON: megatron.read,
    Format.TORCHTITAN: torchtitan.read,
    Format.DEEPSPEED: deepspeed.read,
    Format.NANOTRON: nanotron.read,
}


def read_log(format: Format, name: str, content: Content | str, stated: Stated) -> Imported:
    """A log of nccl-tests or of a training framework. A last line without its end is left out, and said to be.

    Args:
        format: any but csv.
        name: the file, for complaints.
        content: opens it, or its text.
        stated: what the user says of it.

    Raises:
        InputError: names the file, the line, the value and what is allowed; then nothing of it can be imported.
    """
    text = content
    file = LogFile(name, (lambda: BytesIO(text.encode())) if isinstance(text, str) else text)
    if format is Format.NCCL_TESTS:
        readings, notes = nccl.read(file, stated.cluster)
        return Imported(readings=readings, notes=[f"{name}: {note}" for note in notes])
    log = _READERS[format](file)
    run = run_of(log, stated)
    if file.cut is not None:
        log.notes.append(f"line {file.cut} is cut off and left out")
    return Imported(runs=[run], run_count=1, notes=[f"{name}: {note}" for note in log.notes])


def read_table(path: Path, clusters: Clusters, *, model: ModelSpec | None = None, skip_bad: bool = False) -> Imported:
    """A runs file (docs/backtest.md). Raises InputError for the first bad row, unless `skip_bad` leaves them out."""
    runs, count, readings, notes = history.read(path, clusters, model=model, skip_bad=skip_bad)
    return Imported(runs=runs, run_count=count, readings=readings, notes=notes)


# A file's identity: the digest of its content, and whether an earlier import is its beginning.


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file as it is now, read piece by piece: what is written to its end meanwhile is no part of it.

    Raises:
        InputError: it cannot be read.
    """

    path: Path
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileContent:
        """The content of that file."""
        with _readable(path):
            return cls(path, path.stat().st_size)

    def __call__(self) -> Iterator[bytes]:
        """Its lines."""
        left = self.size_bytes
        with _readable(self.path), self.path.open("rb") as file:
            while line := file.readline(min(left, MAX_LINE_BYTES + 1)):
                left -= len(line)
                yield line

    def digests(self, sizes: Iterable[int]) -> dict[int, str]:
        """SHA-256, in hexadecimal digits, of its first so many bytes, by that number."""
        digest, found, done = hashlib.sha256(), {}, 0
        with _readable(self.path), self.path.open("rb") as file:
            for size in sorted(set(sizes)):
                while done < size and (piece := file.read(min(size - done, _PIECE_BYTES))):
                    digest.update(piece)
                    done += len(piece)
                found[size] = digest.hexdigest()
        return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError("file", str(path), f"a readable file is needed ({reason})") from None


def batch_of(content: FileContent, source: str, format: Format, now: datetime) -> ImportBatch:
    """The file as it would be stored. Raises InputError for a source name that is taken or cannot be one."""
    if source in OWN_SOURCES:
        raise InputError("--source", source, "this name is our own measurements'; give another one")
    data = {
        "source": source,
        "file_name": content.path.name,
        "format": format.value,
        "sha256": content.digests([content.size_bytes])[content.size_bytes],
        "size_bytes": content.size_bytes,
        "imported_at": now.isoformat(),
    }
    return ImportBatch.from_data(data, "import")


def beginnings(content: FileContent, known: Iterable[ImportBatch]) -> list[ImportBatch]:
    """The imports whose content is the beginning of this one: the same log, when it was shorter."""
    shorter = [batch for batch in known if batch.size_bytes < content.size_bytes]
    digests = content.digests(batch.size_bytes for batch in shorter)
    return [batch for batch in shorter if digests[batch.size_bytes] == batch.sha256]
