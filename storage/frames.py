"""What is stored as pandas frames, and frames as files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from sqlalchemy import BigInteger, Boolean, Double, Integer, Select, select
from sqlalchemy.orm import InstrumentedAttribute

from autotune.errors import InputError, UnknownNameError
from autotune.files import whole_file
from autotune.shown import as_cell
from autotune.specs import ClusterSpec, FailureKind, ModelSpec, TrialState, Workload
from storage.database.columns import Base, UtcDateTime
from storage.database.session import SessionStore
from storage.tunings.tables import CollectiveRow, LayerRow, ProbeRow, ProfileRow, RankRow, StepRow, TrialRow, TuningRow

TABLES = ("runs", "trials", "tunings", "probes", "collective", "layer", "step", "ranks", "profiles")


TEXT, COUNT, FIGURE = "string", "Int64", "Float64"

# Column by column, with its type. GB here are GiB; what we do not measure for a run stays missing: params_b (the
# shape is there to count from) and the speeds of the network.
RUN_COLUMNS = (
    dict.fromkeys(("source", "group", "model_name"), TEXT)
    | {"params_b": FIGURE}
    | dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"), COUNT)
    | {"gpu": TEXT, "gpu_mem_gb": FIGURE}
    | dict.fromkeys(("gpus_per_node", "num_gpus", "tp", "pp", "cp", "ep", "dp", "vpp"), COUNT)
    | {"sp": "boolean"}
    | dict.fromkeys(("zero_stage", "micro_batch", "global_batch"), COUNT)
    | dict.fromkeys(("recompute", "dtype", "grad_dtype", "schedule"), TEXT)
    | dict.fromkeys(("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "iter_time_s"), FIGURE)
    | dict.fromkeys(("peak_mem_gb", "mem_alloc_gb"), FIGURE)
    | dict.fromkeys(("status", "net_state"), TEXT)
    | dict.fromkeys(("net_allreduce_GBps", "intra_allreduce_GBps"), FIGURE)
    | {"note": TEXT}
)

# Ends that say nothing about the plan: such trials are no runs.
WITHOUT_VERDICT = tuple(
    kind.value for kind in (FailureKind.LOST, FailureKind.CANCELLED, FailureKind.UNAVAILABLE, FailureKind.SLOW)
)


class FileFormat(StrEnum):
    """File formats of `export`."""

    CSV = "csv"
    PARQUET = "parquet"


def frame(store: SessionStore, table: str) -> pd.DataFrame:
    """One table as a frame, oldest row first; moments in UTC, absent figures as missing values.

    Args:
        store: an open store.
        table: one of TABLES. `trials` has the plan, the estimate's and the measured figures side by side; `runs`
            is the format of published runs, so that a backtest reads both alike (RUN_COLUMNS).

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
        # The new file replaces the old one by name, which would remove a device such as /dev/null for everybody.
        if not os.path.isfile(target):
            raise InputError("path", str(path), "this exists and is no regular file; name another one")
        if not overwrite:
            raise InputError("path", str(path), "the file exists; name another one, or allow overwriting (--overwrite)")
    data = frame(store, table)
    try:
        with whole_file(target) as file:
            _write(data, FileFormat(format), file)
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
        data = data.copy()
        for name in [name for name, kind in data.dtypes.items() if kind == TEXT]:
            data[name] = data[name].map(as_cell, na_action="ignore")
        data.to_csv(path, index=False)
    else:
        data.to_parquet(path, index=False)


def run_records(store: SessionStore) -> list[dict[str, Any]]:
    """All ended trials, oldest first, one record each with the keys of RUN_COLUMNS; missing keys are unknown."""
    query = (
        select(TrialRow, TuningRow, StepRow)
        .join(TuningRow, TuningRow.id == TrialRow.tuning_id)
        .outerjoin(StepRow, StepRow.trial_id == TrialRow.id)
        .where(TrialRow.state != TrialState.RUNNING.value)
        .where(TrialRow.failure_kind.is_(None) | TrialRow.failure_kind.not_in(WITHOUT_VERDICT))
        .order_by(TrialRow.started_at, TrialRow.id)
    )
    with store.reading() as session:
        rows = session.execute(query).all()
        groups = _groups([tuning for _, tuning, _ in rows])
        return [
            _request(tuning.model_json, tuning.cluster_json, tuning.workload_json)
            | _plan(trial)
            | (_measured(step, tuning) if step else {})
            | {"source": "autotune", "group": groups[_keys(tuning)], "status": _status(trial), "note": _note(trial)}
            for trial, tuning, step in rows
        ]


def _keys(tuning: TuningRow) -> tuple[str, str, str]:
    return tuning.model_key, tuning.cluster_key, tuning.workload_key


def _groups(tunings: Iterable[TuningRow]) -> dict[tuple[str, str, str], str]:
    """A group of comparable runs by what was asked for: model|cluster|sequence length|global batch.

    Where two requests would share that name (a model was replaced by another one of its name, another dtype), the
    later ones add their keys, as a group must agree in all of it.
    """
    groups: dict[tuple[str, str, str], str] = {}
    for tuning in tunings:
        keys = _keys(tuning)
        if keys not in groups:
            name = f"{tuning.model_name}|{tuning.cluster_name}|{tuning.seq_len}|{tuning.global_batch}"
            groups[keys] = f"{name}|{'-'.join(keys)}" if name in groups.values() else name
    return groups


@lru_cache(maxsize=64)
def _request(model_json: str, cluster_json: str, workload_json: str) -> dict[str, Any]:
    model, cluster = ModelSpec.from_json(model_json), ClusterSpec.from_json(cluster_json)
    workload = Workload.from_json(workload_json)
    shape = {name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    return {
        **shape,
        "model_name": model.name,
        "seq_len": workload.seq_len,
        "global_batch": workload.global_batch,
        "dtype": workload.dtype.value,
        "grad_dtype": workload.gradients.value,
        "gpu": cluster.device.name,
        "gpu_mem_gb": cluster.device.memory_bytes / 2**30,
        "gpus_per_node": cluster.gpus_per_node,
        "num_gpus": cluster.devices,
    }


def _plan(trial: TrialRow) -> dict[str, Any]:
    names = ("tp", "pp", "cp", "ep", "dp", "vpp", "zero_stage", "micro_batch", "recompute", "schedule")
    return {name: getattr(trial, name) for name in names} | {"sp": trial.sequence_parallel}


def _measured(step: StepRow, tuning: TuningRow) -> dict[str, Any]:
    return {
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu": step.mfu,
        "tflops_per_gpu": _tflops(step.mfu, tuning),
        "iter_time_s": step.step_time_s,
        "peak_mem_gb": step.peak_reserved_bytes / 2**30,
        "mem_alloc_gb": step.peak_allocated_bytes / 2**30,
    }


def _tflops(mfu: float | None, tuning: TuningRow) -> float | None:
    """Model FLOPs a second, back from the MFU and the peak it was taken against."""
    cluster, workload = ClusterSpec.from_json(tuning.cluster_json), Workload.from_json(tuning.workload_json)
    peak = cluster.device.peak_flops_per_s.get(workload.dtype)
    return None if mfu is None or peak is None else mfu * peak / 1e12


def _status(trial: TrialRow) -> str:
    if trial.failure_kind is None:
        return "ok"
    return "oom" if trial.failure_kind == FailureKind.OOM.value else "fail"


def _note(trial: TrialRow) -> str:
    reason = trial.failure_kind or ("pruned" if trial.state == TrialState.PRUNED.value else "")
    return f"trial {trial.id}" + (f": {reason}" if reason else "")
