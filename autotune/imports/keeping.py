"""Storing what was imported: each content once, under one source; and what is told of it."""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import Any

from autotune.errors import InputError, StoreConflictError
from autotune.imports.reading import FileContent, Imported, beginnings
from autotune.ports.store import Store
from autotune.specs.imported import ImportBatch, ImportedRun

MAX_TOLD = 1000
"""Runs that are told one by one."""


def keep(
    store: Store | None, batch: ImportBatch, content: FileContent, read: Imported, *, dry_run: bool, named: bool
) -> dict[str, Any]:
    """Stores one file, unless its content is there already; tells what was done with it.

    Args:
        store: keeps it; None where there is none to ask and nothing is to be stored.
        batch: the file.
        content: of the file.
        read: what is in it.
        dry_run: store nothing.
        named: the source was named by the user, not taken from the file's name.

    Raises:
        InputError: the content is stored already, but of another source or read with other options.
    """
    known = () if store is None else store.imports()
    twin = next((item for item in known if item.sha256 == batch.sha256), None)
    outdated = beginnings(content, [item for item in known if item.source == batch.source])
    if store is not None and twin is None and not dry_run:
        try:
            store.save_import(batch, read.runs, read.readings, replaces=[item.sha256 for item in outdated])
        except StoreConflictError:  # another process, or this command's other file, was first
            twin = next(item for item in store.imports() if item.sha256 == batch.sha256)
    if store is not None and twin is not None:
        _require_same(store, twin, batch, read, named=named)
    return {
        "file": batch.file_name,
        "sha256": batch.sha256,
        "stored": twin is None and not dry_run,
        "already": None if twin is None else twin.to_data(),
        "replaces": [] if twin else [item.file_name for item in outdated],
        "runs": [_run_data(run) for run in islice(read.runs, MAX_TOLD)],
        "run_count": read.run_count,
        "readings": [{"where": item.where, **item.reading.to_data()} for item in read.readings],
        "notes": list(read.notes),
    }


def _require_same(store: Store, twin: ImportBatch, batch: ImportBatch, read: Imported, *, named: bool) -> None:
    """Refuses content that is stored already under another source or read with other options: it would not change."""
    anew = f"`autotune imports --forget {twin.source}` makes room to read it again"
    if named and twin.source != batch.source:
        raise InputError("--source", batch.source, f"{batch.file_name} is stored as {twin.source}; {anew}")
    pairs = zip_longest(read.runs, store.runs_of_import(twin.sha256))
    if not all(new and kept and new == kept.model_copy(update={"where": new.where}) for new, kept in pairs):
        raise InputError(batch.file_name, "other options", f"it is stored as it was read before; {anew}")


def _run_data(run: ImportedRun) -> dict[str, Any]:
    """A run as --json shows it: model and cluster by name, the kind of a failure."""
    data = {name: value for name, value in run.to_data().items() if name not in {"framework", "group"}}
    failure = None if run.failure is None else run.failure.kind.value
    return {**data, "model": run.model.name, "cluster": run.cluster.name, "failure": failure}
