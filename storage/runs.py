"""Our trials in the format of published runs, so that a backtest reads both alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sqlalchemy import select

from autotune.specs import ClusterSpec, FailureKind, ModelSpec, TrialState, Workload
from storage.database.session import SessionStore
from storage.tunings.tables import StepRow, TrialRow, TuningRow

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
WITHOUT_VERDICT = (FailureKind.LOST.value, FailureKind.CANCELLED.value, FailureKind.UNAVAILABLE.value)


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
        "grad_dtype": workload.grad_dtype.value,
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
