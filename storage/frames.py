"""What is stored as pandas frames, and frames as files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd
from sqlalchemy import BigInteger, Boolean, Double, Integer, Select, select
from sqlalchemy.orm import InstrumentedAttribute

from autotune.errors import InputError, UnknownNameError
from storage.database.columns import Base, UtcDateTime
from storage.database.session import SessionStore
from storage.runs import RUN_COLUMNS, run_records
from storage.tunings.tables import CollectiveRow, LayerRow, ProbeRow, ProfileRow, RankRow, StepRow, TrialRow, TuningRow

TABLES = ("runs", "trials", "tunings", "probes", "collective", "layer", "step", "ranks", "profiles")


class FileFormat(StrEnum):
    """File formats of `export`."""

    CSV = "csv"
    PARQUET = "parquet"


def frame(store: SessionStore, table: str) -> pd.DataFrame:
    """One table as a frame, oldest row first; moments in UTC, absent figures as missing values.

    Args:
        store: an open store.
        table: one of TABLES. `trials` has the plan, the estimate's and the measured figures side by side; `runs`
            is the format of published runs that a backtest reads (storage.runs).

    Raises:
        UnknownNameError: there is no such table.
    """
    if table == "runs":
        return pd.DataFrame(run_records(store), columns=list(RUN_COLUMNS)).astype(RUN_COLUMNS)
    if table not in TABLES:
        raise UnknownNameError("table", table, TABLES)
    columns, query = _query(table)
    with store.reading() as session:
        rows = session.execute(query).all()
    kinds = {column.key: _kind(column) for column in columns}
    return pd.DataFrame([tuple(row) for row in rows], columns=list(kinds)).astype(kinds)


def export(
    store: SessionStore, table: str, format: FileFormat | str, path: str | Path, *, overwrite: bool = False
) -> Path:
    """Writes one table to a file, whole or not at all; returns its path. A link is followed, not replaced.

    Raises:
        UnknownNameError: no such table or format.
        InputError: the file exists and `overwrite` is not given, it is no regular file, or it cannot be written.
    """
    if format not in list(FileFormat):
        raise UnknownNameError("format", str(format), list(FileFormat))
    target = Path(os.path.realpath(path))
    if os.path.exists(target):
        # The new file takes the old one's place by its name: a device such as /dev/null would be gone for everybody.
        if not os.path.isfile(target):
            raise InputError("path", str(path), "this exists and is no regular file; name another one")
        if not overwrite:
            raise InputError("path", str(path), "the file exists; name another one, or allow overwriting (--overwrite)")
    data = frame(store, table)
    try:
        _write_whole(target, lambda file: _write(data, FileFormat(format), file))
    except OSError as error:
        raise InputError("path", str(path), f"a file that can be written ({error.strerror})") from error
    return Path(path)


def _query(table: str) -> tuple[list[InstrumentedAttribute[Any]], Select[*tuple[Any, ...]]]:
    columns: list[InstrumentedAttribute[Any]]
    if table == "trials":
        asked = [column for column in _columns(TuningRow) if column.key in REQUEST_COLUMNS]
        columns = [*_columns(TrialRow), *asked]
        taken = {column.key for column in columns} | {"trial_id", "probe_run_id"}
        columns += [column for column in _columns(StepRow) if column.key not in taken]
        query = select(*columns).join(TuningRow, TuningRow.id == TrialRow.tuning_id)
        query = query.outerjoin(StepRow, StepRow.trial_id == TrialRow.id)
        return columns, query.order_by(TrialRow.started_at, TrialRow.id)
    if table == "ranks":
        columns = [StepRow.trial_id, StepRow.probe_run_id, StepRow.fingerprint_key, *_columns(RankRow)]
        return columns, select(*columns).join(StepRow, StepRow.id == RankRow.step_measurement_id).order_by(RankRow.id)
    row, order = PLAIN[table]
    columns = _columns(row)
    return columns, select(*columns).order_by(order)


REQUEST_COLUMNS = (
    "model_name", "model_key", "cluster_name", "cluster_key", "devices", "workload_key", "seq_len", "global_batch",
    "dtype",
)  # fmt: skip
CLAIM_COLUMNS = ("sharing_key", "claimed_at", "claim_expires_at", "advanced_at")
PLAIN: dict[str, tuple[type[Base], InstrumentedAttribute[Any]]] = {
    "tunings": (TuningRow, TuningRow.created_at),
    "probes": (ProbeRow, ProbeRow.finished_at),
    "collective": (CollectiveRow, CollectiveRow.id),
    "layer": (LayerRow, LayerRow.id),
    "step": (StepRow, StepRow.id),
    "profiles": (ProfileRow, ProfileRow.id),
}


def _columns(row: type[Base]) -> list[InstrumentedAttribute[Any]]:
    """All columns but the JSON of specs, which frames show by their keys and fields, and the state of claims."""
    keys = [attribute.key for attribute in row.__mapper__.column_attrs]
    return [getattr(row, key) for key in keys if not key.endswith("_json") and key not in CLAIM_COLUMNS]


def _kind(column: InstrumentedAttribute[Any]) -> str:
    kinds = {UtcDateTime: "datetime64[us, UTC]", Boolean: "boolean", Double: "Float64"}
    kinds |= {BigInteger: "Int64", Integer: "Int64"}
    return next((kind for type_, kind in kinds.items() if isinstance(column.type, type_)), "string")


def _write(data: pd.DataFrame, format: FileFormat, path: Path) -> None:
    if format is FileFormat.CSV:
        data.to_csv(path, index=False)
    else:
        data.to_parquet(path, index=False)


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Writes beside the target, then renames: nobody ever sees half a file."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        part.chmod(0o644)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
