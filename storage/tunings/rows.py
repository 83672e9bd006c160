"""From specs to rows and back, without loss: what went in comes out equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    Estimate,
    Failure,
    FailureKind,
    LayerPart,
    LayerReading,
    ModelSpec,
    Plan,
    Profile,
    RankReading,
    Recompute,
    SamplerName,
    Space,
    StepReading,
    Trial,
    TrialState,
    Tuning,
    TuningState,
    Workload,
)
from storage.tunings.tables import (
    CollectiveRow,
    FailureColumns,
    LayerRow,
    PlanColumns,
    ProfileRow,
    RankCommRow,
    RankRow,
    SampleRow,
    StepRow,
    TrialRow,
    TuningRow,
)

STEP_COLUMNS = tuple(name for name in StepReading.model_fields if hasattr(StepRow, name) and name != "ranks")
RANK_COLUMNS = tuple(name for name in RankReading.model_fields if hasattr(RankRow, name))
SERIES = {"step": "step_times_s", "warmup": "warmup_times_s", "loss": "losses"}


def tuning_values(tuning: Tuning) -> dict[str, Any]:
    """The columns of a new tuning."""
    return {
        "id": tuning.id,
        "model_name": tuning.model.name,
        "model_key": tuning.model.key,
        "model_json": tuning.model.to_json(),
        "cluster_name": tuning.cluster.name,
        "cluster_key": tuning.cluster.key,
        "cluster_json": tuning.cluster.to_json(),
        "devices": tuning.cluster.devices,
        "workload_key": tuning.workload.key,
        "workload_json": tuning.workload.to_json(),
        "seq_len": tuning.workload.seq_len,
        "global_batch": tuning.workload.global_batch,
        "dtype": tuning.workload.dtype.value,
        "space_json": tuning.space.to_json(),
        "budget_json": tuning.budget.to_json(),
        "seed": tuning.seed,
        "cold": tuning.cold,
        "sampler": tuning.sampler.value,
        "history": tuning.history,
        "pool": tuning.pool,
        "principal": tuning.principal,
        "created_at": tuning.created_at,
        "gpu_s_spent": tuning.gpu_s_spent,
        **tuning_progress(tuning),
    }


def tuning_progress(tuning: Tuning) -> dict[str, Any]:
    """The columns of a tuning that change."""
    return {
        "state": tuning.state.value,
        "message": tuning.message,
        "stop_reason": tuning.stop_reason,
        "owner": tuning.owner,
        "updated_at": tuning.updated_at,
    }


def tuning_of(row: TuningRow) -> Tuning:
    """The tuning of a row."""
    plain = ("id", "seed", "cold", "history", "pool", "principal", "message", "stop_reason", "owner", "gpu_s_spent")
    return Tuning(
        **values(row, (*plain, "created_at", "updated_at")),
        model=ModelSpec.from_json(row.model_json),
        cluster=ClusterSpec.from_json(row.cluster_json),
        workload=Workload.from_json(row.workload_json),
        space=Space.from_json(row.space_json),
        budget=Budget.from_json(row.budget_json),
        sampler=SamplerName(row.sampler),
        state=TuningState(row.state),
    )


def trial_row(trial: Trial) -> TrialRow:
    """The row of a trial that starts."""
    estimate = trial.estimate
    return TrialRow(
        **{name: getattr(trial, name) for name in ("id", "tuning_id", "number", "gpu_s", "setup_s", "owner")},
        **plan_columns(trial.plan),
        state=trial.state.value,
        estimate_json=estimate and estimate.to_json(),
        estimate_step_time_s=estimate and estimate.step_time_s,
        estimate_tokens_per_s_per_gpu=estimate and estimate.tokens_per_s_per_gpu,
        estimate_peak_memory_bytes=estimate and estimate.peak_memory_bytes,
        fingerprint_key=trial.fingerprint_key or None,
        started_at=trial.started_at,
    )


def trial_of(row: TrialRow) -> Trial:
    """The trial of a row, with its reading."""
    plain = ("id", "tuning_id", "number", "gpu_s", "setup_s", "owner", "started_at", "finished_at")
    return Trial(
        **values(row, plain),
        plan=Plan.from_json(row.plan_json),
        state=TrialState(row.state),
        estimate=Estimate.from_json(row.estimate_json) if row.estimate_json else None,
        reading=step_of(row.measurement) if row.measurement else None,
        failure=failure_of(row),
        fingerprint_key=row.fingerprint_key or "",
    )


def plan_columns(plan: Plan) -> dict[str, Any]:
    """A plan as the columns of PlanColumns."""
    fields = {name: value for name, value in plan.to_data().items() if name in PlanColumns.__annotations__}
    return {"plan_key": plan.key, "plan_json": plan.to_json(), **fields}


def failure_columns(failure: Failure | None) -> dict[str, Any]:
    """A failure, or none, as the columns of FailureColumns."""
    data = failure.to_data() if failure else dict.fromkeys(Failure.model_fields)
    return {f"failure_{name}": value for name, value in data.items()}


def failure_of(row: FailureColumns) -> Failure | None:
    """The failure of a row, if it has one."""
    if row.failure_kind is None:
        return None
    return Failure(
        kind=FailureKind(row.failure_kind),
        message=row.failure_message or "",
        rank=row.failure_rank,
        stage=row.failure_stage,
        log_path=row.failure_log_path,
        log_tail=row.failure_log_tail or "",
    )


def step_row(reading: StepReading, **keys: str | None) -> StepRow:
    """The rows of a step reading: itself, its series and its ranks. `keys` say what it belongs to."""
    low, high = reading.interval_tokens_per_s_per_gpu
    return StepRow(
        **keys,
        **values(reading, STEP_COLUMNS),
        interval_low_tokens_per_s_per_gpu=low,
        interval_high_tokens_per_s_per_gpu=high,
        repeats=len(reading.step_times_s),
        samples=[
            SampleRow(series=series, number=number, value=value)
            for series, field in SERIES.items()
            for number, value in enumerate(getattr(reading, field))
        ],
        ranks=[_rank_row(rank) for rank in reading.ranks],
    )


def step_of(row: StepRow) -> StepReading:
    """The step reading of a row; its ranks in ascending order."""
    series: dict[str, Any] = {
        field: tuple(sample.value for sample in row.samples if sample.series == name) for name, field in SERIES.items()
    }
    return StepReading(
        **values(row, STEP_COLUMNS),
        **series,
        interval_tokens_per_s_per_gpu=(row.interval_low_tokens_per_s_per_gpu, row.interval_high_tokens_per_s_per_gpu),
        ranks=tuple(
            RankReading(**values(rank, RANK_COLUMNS), comm_s_by_op={time.op: time.time_s for time in rank.comm_times})
            for rank in row.ranks
        ),
    )


def _rank_row(reading: RankReading) -> RankRow:
    times = [RankCommRow(op=op, time_s=time_s) for op, time_s in reading.comm_s_by_op.items()]
    return RankRow(**values(reading, RANK_COLUMNS), comm_times=times)


def collective_row(reading: CollectiveReading, **keys: str) -> CollectiveRow:
    """The row of a collective reading."""
    return CollectiveRow(**keys, **reading.to_data())


def collective_of(row: CollectiveRow) -> CollectiveReading:
    """The collective reading of a row."""
    return CollectiveReading(**values(row, CollectiveReading.model_fields) | {"op": CollectiveOp(row.op)})


def layer_row(reading: LayerReading, **keys: str) -> LayerRow:
    """The row of a layer reading."""
    return LayerRow(**keys, **reading.to_data())


def layer_of(row: LayerRow) -> LayerReading:
    """The layer reading of a row."""
    enums = {"part": LayerPart(row.part), "recompute": Recompute(row.recompute)}
    return LayerReading(**values(row, LayerReading.model_fields) | enums)


def profile_row(profile: Profile) -> ProfileRow:
    """The row of a new version of a profile, without its moment."""
    scalars = ("step_scale", "step_scale_trials", "step_overhead_s", "memory_overhead_bytes", "memory_scale")
    return ProfileRow(
        **values(profile, ("cluster_key", *scalars)),
        fingerprint_key=profile.fingerprint_key or None,
        compute_flops_per_s=profile.compute and profile.compute.flops_per_s,
        compute_launch_s=profile.compute and profile.compute.launch_s,
        spec_json=profile.to_json(),
    )


def values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of those names."""
    return {name: getattr(source, name) for name in names}
