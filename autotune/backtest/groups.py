"""Groups: runs that may be compared with each other, one outcome a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.backtest.runs import Run, RunStatus, Skipped
from autotune.cost.network import ring_traffic
from autotune.errors import InputError
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    DeviceKind,
    Failure,
    FailureKind,
    ModelSpec,
    Plan,
    StepReading,
    Workload,
)

SETUP_S = 60.0
"""Taken for what a trial costs before its first step, which no runs file states."""

PROBE_BYTES = 256 * 2**20
"""Size of the all-reduce behind the readings of a runs file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What running a plan gives: the mean over its repeats.

    Args:
        plan: the plan.
        status: the repeats' majority; ok wins a tie.
        tokens_per_s_per_gpu: mean over the ok repeats; 0 unless the status is ok.
        reserved_bytes: largest of the repeats, None where unknown.
        allocated_bytes: the same.
    """

    plan: Plan
    status: RunStatus
    tokens_per_s_per_gpu: float
    reserved_bytes: float | None
    allocated_bytes: float | None

    @property
    def ok(self) -> bool:
        """Whether the plan has a speed."""
        return self.status is RunStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The plans of one model, cluster and workload, in the order of their keys (never that of the file)."""

    name: str
    source: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    outcomes: tuple[Outcome, ...]
    readings: tuple[CollectiveReading, ...]

    @property
    def plans(self) -> list[Plan]:
        """All plans that were run."""
        return [item.plan for item in self.outcomes]

    @property
    def speeds(self) -> np.ndarray:
        """Measured tokens a second and GPU, 0 for what failed: float64 [plans]."""
        return np.array([item.tokens_per_s_per_gpu for item in self.outcomes], dtype=np.float64)

    @property
    def best(self) -> float:
        """The fastest plan's tokens a second and GPU."""
        return float(self.speeds.max())

    @property
    def ok(self) -> int:
        """Plans that ran."""
        return sum(item.ok for item in self.outcomes)

    def result(self, i: int) -> StepReading | Failure:
        """What a step probe of outcome i would have told."""
        item = self.outcomes[i]
        if not item.ok:
            kind = FailureKind.OOM if item.status is RunStatus.OOM else FailureKind.CRASH
            return Failure(kind=kind, message="a run of the file")
        speed = item.tokens_per_s_per_gpu
        on_cpu = self.cluster.device.kind is DeviceKind.CPU
        return stated_reading(
            speed,
            (speed, speed),
            self.workload.tokens_per_step / (speed * self.cluster.devices),
            reserved_bytes=item.reserved_bytes,
            allocated_bytes=item.allocated_bytes if item.reserved_bytes or on_cpu else None,
            memory_source="runs file",
            setup_s=SETUP_S,
        )


def group_runs(runs: Sequence[Run], *, min_ok: int = 1, skip_bad: bool = False) -> tuple[list[Group], list[Skipped]]:
    """The groups of the runs, in the order of their first row, and what was left out.

    A group is of the model, cluster and workload that most of its rows have, whatever their order; a row that disagrees
    is bad, and so is a group that has no such majority or no successful plan. Groups with fewer than `min_ok`
    successful plans are left out silently: that was asked for.

    Raises:
        InputError: something bad, unless `skip_bad`.
    """
    skipped: list[Skipped] = []
    by_name: dict[str, list[Run]] = {}

    def refuse(what: str, value: str, allowed: str, where: str) -> None:
        error = InputError(what, value, allowed)
        if not skip_bad:
            raise error
        skipped.append(Skipped(where=where, reason=str(error)))

    for run in runs:
        by_name.setdefault(run.group, []).append(run)
    for name, rows in by_name.items():
        counts = Counter(_settings(run) for run in rows)
        (settings, most), *others = counts.most_common(2)
        if others and others[0][1] == most:
            one, other = (next(run for run in rows if _settings(run) == each) for each in (settings, others[0][0]))
            column = _difference(one, other)
            refuse(f"{name}, column {column}", name, f"must agree: {most} rows each have two values", name)
            by_name[name] = []
            continue
        usual = next(run for run in rows if _settings(run) == settings)
        for run in rows:
            if column := _difference(usual, run):
                refuse(f"{run.where}, column {column}", run.group, "must agree in all rows of a group", run.where)
        by_name[name] = [run for run in rows if not _difference(usual, run)]
    groups = [_group(rows) for rows in by_name.values() if rows]
    for group in groups:
        if not group.ok:
            refuse("group", group.name, "needs at least one run that is ok", group.name)
    return [group for group in groups if group.ok >= max(min_ok, 1)], skipped


def _settings(run: Run) -> tuple[str, str, str]:
    """What all rows of a group have alike."""
    model = run.model.model_copy(update={"max_positions": 0})  # follows the sequence length
    return model.key, run.cluster.key, run.workload.key


def _difference(first: Run, run: Run) -> str:
    """The column in which a row disagrees with its group; empty if in none."""
    for one, other in ((first.model, run.model), (first.workload, run.workload)):
        for name in type(one).model_fields:
            if name not in {"name", "max_positions"} and getattr(one, name) != getattr(other, name):
                return {"gated": "params_b", "tied": "params_b"}.get(name, name)
    if first.cluster.devices != run.cluster.devices:
        return "num_gpus"
    return "gpu" if first.cluster.key != run.cluster.key else ""


def _group(rows: Sequence[Run]) -> Group:
    by_plan: dict[Plan, list[Run]] = {}
    for run in rows:
        by_plan.setdefault(run.plan, []).append(run)
    first = rows[0]
    return Group(
        name=first.group,
        source=first.source,
        model=first.model,
        cluster=first.cluster,
        workload=first.workload,
        outcomes=tuple(sorted((_outcome(repeats) for repeats in by_plan.values()), key=lambda item: item.plan.key)),
        readings=tuple(network_readings(rows)),
    )


def _outcome(repeats: Sequence[Run]) -> Outcome:
    counts = Counter(run.status for run in repeats)
    status = max(RunStatus, key=lambda item: counts[item])  # the first of equals: ok, then oom, then fail
    speeds = [run.tokens_per_s_per_gpu for run in repeats if run.tokens_per_s_per_gpu is not None]
    return Outcome(
        plan=repeats[0].plan,
        status=status,
        tokens_per_s_per_gpu=float(np.mean(speeds)) if status is RunStatus.OK else 0.0,
        reserved_bytes=max((run.reserved_bytes for run in repeats if run.reserved_bytes), default=None),
        allocated_bytes=max((run.allocated_bytes for run in repeats if run.allocated_bytes), default=None),
    )


def network_readings(rows: Sequence[Run]) -> list[CollectiveReading]:
    """What one collective probe before the search would have read: the median over the group's rows."""
    one_node = [item for run in rows if (item := run.one_node_busbw_bytes_per_s) is not None]
    all_ranks = [item for run in rows if (item := run.all_ranks_busbw_bytes_per_s) is not None]
    return median_readings(rows[0].cluster, one_node, all_ranks)


def median_readings(
    cluster: ClusterSpec, one_node: Sequence[float], all_ranks: Sequence[float]
) -> list[CollectiveReading]:
    """All-reduces at the median bus bandwidths (bytes/s) among the ranks of a node and among all of them."""
    found = []
    if cluster.nodes == 1:
        one_node, all_ranks = one_node or all_ranks, []
    for size, values in ((cluster.gpus_per_node, one_node), (cluster.devices, all_ranks)):
        if not values or size < 2:
            continue
        busbw_bytes_per_s = float(np.median(values))
        traffic = ring_traffic(CollectiveOp.ALL_REDUCE, size)
        time_s = traffic * PROBE_BYTES / busbw_bytes_per_s
        found.append(
            CollectiveReading(
                op=CollectiveOp.ALL_REDUCE,
                group_size=size,
                stride=1,
                size_bytes=PROBE_BYTES,
                iterations=1,
                time_s=time_s,
                time_p10_s=time_s,
                time_p90_s=time_s,
                algbw_bytes_per_s=busbw_bytes_per_s / traffic,
                busbw_bytes_per_s=busbw_bytes_per_s,
            )
        )
    return found


def stated_reading(
    tokens_per_s_per_gpu: float,
    interval: tuple[float, float],
    step_s: float,
    *,
    reserved_bytes: float | None,
    allocated_bytes: float | None,
    memory_source: str,
    setup_s: float,
) -> StepReading:
    """A run elsewhere as a reading: what is known of it. Peaks of 0 mean unknown, and teach nothing of memory."""
    return StepReading(
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        interval_tokens_per_s_per_gpu=interval,
        step_time_s=step_s,
        step_times_s=(step_s,),
        warmup_times_s=(),
        steady=True,
        traced_step_s=None,
        t_calc_s=None,
        t_comm_s=None,
        t_comm_exposed_s=None,
        mu=None,
        mfu=None,
        peak_allocated_bytes=round(allocated_bytes or 0),
        peak_reserved_bytes=round(reserved_bytes or 0),
        memory_source=memory_source,
        losses=(),
        pruned=False,
        setup_s=setup_s,
        ranks=(),
    )
