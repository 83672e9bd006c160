"""What imports of one source teach: how far the estimate is off, trials to start from, and links.

They are never among a tuning's own results: its plans are measured anew, imported ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import numpy as np

from autotune.backtest.groups import stated_reading
from autotune.cost.calibrate import fit_links, fit_profile
from autotune.cost.estimate import estimate_table
from autotune.cost.framework import FRAMEWORKS, TORCH, Framework, framework_for
from autotune.cost.table import PlanTable
from autotune.errors import MissingMeasurementError
from autotune.search.posterior import TransferObservation
from autotune.search.transfer import Shown, alike, merged, transfers_of
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    FailureKind,
    FrameworkName,
    ModelSpec,
    Plan,
    Profile,
    Trial,
    TrialState,
    Workload,
)
from autotune.specs.imported import ImportedRun

Readings = Callable[[ClusterSpec], Sequence[CollectiveReading]]
"""The source's collective readings on a cluster."""

UNKNOWN_MOMENT = datetime(1970, 1, 1, tzinfo=UTC)
"""Logs do not reliably tell when a run was."""


def same_request(
    runs: Iterable[ImportedRun], model: ModelSpec, cluster: ClusterSpec, workload: Workload
) -> list[ImportedRun]:
    """The runs of exactly that model, cluster and workload."""
    wanted = (model.key, cluster.key, workload.of_any_software().key)
    return [run for run in runs if _request(run) == wanted]


def framework_of(runs: Sequence[ImportedRun], workload: Workload) -> Framework:
    """The workload's framework where it names one; else that of all those runs, ours if they have several or none."""
    names = {run.framework for run in runs}
    if workload.framework is not FrameworkName.TORCH or len(names) != 1:
        return framework_for(workload)
    return framework_for(workload, FRAMEWORKS.get(names.pop()))


def trials_of(runs: Iterable[ImportedRun]) -> list[Trial]:
    """Runs as ended trials, for Search(history=...). A run that failed otherwise than of memory teaches nothing."""
    told = (run for run in runs if run.failure is None or run.failure.kind is FailureKind.OOM)
    trials = []
    for number, run in enumerate(told):
        speed, reading = run.tokens_per_s_per_gpu, None
        if speed is not None:
            reading = stated_reading(
                speed,
                run.interval_tokens_per_s_per_gpu or (speed, speed),
                run.workload.tokens_per_step / (speed * run.cluster.devices),
                reserved_bytes=run.peak_reserved_bytes,
                # What was allocated is no peak of what counts, unless what was reserved is known too.
                allocated_bytes=run.peak_allocated_bytes if run.peak_reserved_bytes else None,
                memory_source=f"import: {run.where}",
                setup_s=0.0,
            )
        trials.append(
            Trial(
                id=f"imported-{number}",
                tuning_id="",
                number=number,
                plan=run.plan,
                state=TrialState.COMPLETE if run.failure is None else TrialState.FAILED,
                reading=reading,
                failure=run.failure,
                started_at=UNKNOWN_MOMENT,
            )
        )
    return trials


def transfers_from(
    runs: Iterable[ImportedRun], cluster: ClusterSpec, readings: Readings, profile: Profile | None = None
) -> list[TransferObservation]:
    """What runs on such a cluster showed of the estimate's errors: one transfer a plan.

    Args:
        runs: of any model, size and workload; those on other devices or links are left out, and so are those that no
            estimate is possible for.
        cluster: the one that is asked about.
        readings: calibrate the estimates of the runs, as a tuning's own probes calibrate its.
        profile: of the cluster: what it says of the devices holds for the runs', too.
    """
    groups: dict[tuple[str, ...], list[ImportedRun]] = {}
    for run in runs:
        if alike(run.cluster, cluster):
            groups.setdefault((*_request(run), run.framework), []).append(run)
    found: list[TransferObservation] = []
    for group in groups.values():
        there, calibration = group[0].cluster, profile
        if profile is not None and there.key != cluster.key:  # its links are of other layouts
            calibration = profile.model_copy(update={"cluster_key": there.key, "links": ()})
        found += _transfers(group, with_links(calibration, there, readings(there)))
    return merged(found)


def fastest_plans(runs: Iterable[ImportedRun], limit: int) -> list[Plan]:
    """The plans of the fastest runs, each once."""
    fastest = sorted(runs, key=lambda run: -(run.tokens_per_s_per_gpu or 0.0))
    return list(dict.fromkeys(run.plan for run in fastest if run.tokens_per_s_per_gpu))[:limit]


def with_links(profile: Profile | None, cluster: ClusterSpec, readings: Sequence[CollectiveReading]) -> Profile | None:
    """The profile with the links of imported readings where it has none of that operation and layout itself."""
    if not readings:
        return profile
    if profile is None:
        return fit_profile(cluster, "", readings, [], [])
    own = {(link.op, link.group_size, link.stride) for link in profile.links}
    more = [link for link in fit_links(cluster, readings) if (link.op, link.group_size, link.stride) not in own]
    return profile.model_copy(update={"links": (*profile.links, *more)})


def _request(run: ImportedRun) -> tuple[str, str, str]:
    return run.model.key, run.cluster.key, run.workload.of_any_software().key


def _transfers(group: Sequence[ImportedRun], profile: Profile | None) -> list[TransferObservation]:
    first = group[0]
    by_plan: dict[Plan, list[ImportedRun]] = {}
    for run in group:
        by_plan.setdefault(run.plan, []).append(run)
    plans = list(by_plan)
    framework = FRAMEWORKS.get(first.framework, TORCH)
    table = PlanTable.of(plans)
    try:
        estimates = estimate_table(first.model, first.cluster, first.workload, table, profile, framework)
    except MissingMeasurementError:
        return []  # an error of the estimate shows only where there is one
    pooled = []
    for repeats in by_plan.values():  # the mean speed of those that ran, the highest peak
        speeds = [run.tokens_per_s_per_gpu for run in repeats if run.tokens_per_s_per_gpu is not None]
        failures = [run.failure.kind for run in repeats if run.failure is not None]
        pooled.append(
            Shown(
                tokens_per_s_per_gpu=float(np.mean(speeds)) if speeds else None,
                peak_bytes=max((run.peak_reserved_bytes for run in repeats if run.peak_reserved_bytes), default=None),
                out_of_memory=not speeds and FailureKind.OOM in failures,
            )
        )
    return transfers_of(plans, estimates, pooled)
