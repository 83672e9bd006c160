"""A file's identity: the digest of its content, and whether an earlier import is its beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from autotune.errors import InputError
from autotune.imports.reading import Format
from autotune.specs.imported import OWN_SOURCES, ImportBatch


def read_content(path: Path) -> bytes:
    """The bytes of a file. Raises InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError("file", str(path), f"a readable file is needed ({reason})") from None


def batch_of(path: Path, content: bytes, source: str, format: Format, now: datetime) -> ImportBatch:
    """The file as it would be stored. Raises InputError for a source name that is taken or cannot be one."""
    if source in OWN_SOURCES:
        raise InputError("--source", source, "this name is our own measurements'; give another one")
    data = {
        "source": source,
        "file_name": path.name,
        "format": format.value,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
        "imported_at": now.isoformat(),
    }
    return ImportBatch.from_data(data, "import")


def beginnings(content: bytes, known: Iterable[ImportBatch]) -> list[ImportBatch]:
    """The imports whose content is the beginning of this one: the same log, when it was shorter."""
    return [
        batch
        for batch in known
        if batch.size_bytes < len(content) and hashlib.sha256(content[: batch.size_bytes]).hexdigest() == batch.sha256
    ]
