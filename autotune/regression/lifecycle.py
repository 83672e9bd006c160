"""The course of one check over a store: what is next, and how it ends. A machine of its own and a fleet share it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from autotune.ports.regression import RegressionStore
from autotune.regression.conclusion import Background, Conclusion, conclude
from autotune.regression.protocol import Wanted, next_request
from autotune.regression.verdict import quantile
from autotune.regression.windows import level, noise_of_role, role_windows
from autotune.specs import BestEntry, Fingerprint, ProbeRequest, StepRequest
from autotune.specs.regression import (
    AlertChannel,
    CauseKind,
    Check,
    CheckResult,
    CheckRole,
    CheckState,
    VerdictKind,
    series_of,
)
from autotune.tuning.planner import PROBE_DEADLINE_S

MAX_CHECKS = 400
"""Ended checks of a plan, and of a cluster, that a check is judged by: the newest."""

STEPS_ALLOWED, MAX_DEADLINE_S = 300, 3600.0

RENEWED = frozenset({VerdictKind.UNCHANGED, VerdictKind.BETTER, VerdictKind.WORSE})
"""Verdicts whose measurement takes the place of the entry's."""

SHARED_CAUSES = frozenset(
    {
        CauseKind.LINK_INSIDE,
        CauseKind.LINK_ACROSS,
        CauseKind.KERNELS,
        CauseKind.RANK,
        CauseKind.NODE,
        CauseKind.SOFTWARE,
    }
)
"""Causes that concern all plans of a cluster: one incident, however many plans they make slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a check stands: `wanted` is to be measured next; without, it is to be ended as `conclusion` says."""

    wanted: Wanted | None
    conclusion: Conclusion
    background: Background


def background_of(store: RegressionStore, entry: BestEntry, fingerprint_key: str, *, without: str = "") -> Background:
    """What a check of an entry is judged against, in the environment of that fingerprint.

    Args:
        store: has the checks.
        entry: what is checked.
        fingerprint_key: of the environment now.
        without: a check that is no part of it: the one that is judged, which somebody else may have ended just now.
    """
    plans = store.checks(series=series_of(entry), state=CheckState.DONE, limit=MAX_CHECKS)[::-1]
    cluster = store.checks(cluster_key=entry.cluster.key, state=CheckState.DONE, limit=MAX_CHECKS)[::-1]
    same_plan, same_cluster = ([each for each in found if each.id != without] for found in (plans, cluster))
    keys = {check.fingerprint_key for check in same_plan if check.fingerprint_key}
    before: dict[str, Fingerprint] = {key: store.fingerprint(key) for key in keys}
    return Background(
        entry=entry,
        same_plan=same_plan,
        same_cluster=same_cluster,
        now=store.fingerprint(fingerprint_key) if fingerprint_key else None,
        before=before,
    )


def stand_of(store: RegressionStore, check: Check, background: Background | None = None) -> Stand:
    """Where a check stands after all measurements that the store holds."""
    background = background or background_of(
        store, store.best_entry(check.entry_id), check.fingerprint_key, without=check.id
    )
    done = store.measurements(check.id)
    conclusion = conclude(check, done, background)
    wanted = next_request(background.entry, done, again=conclusion.again)
    return Stand(wanted=wanted, conclusion=conclusion, background=background)


def end(
    store: RegressionStore, check: Check, stand: Stand, *, channels: Collection[AlertChannel], now: datetime
) -> Check:
    """Ends a check: its entry shows the newest measurement, and incidents and alerts follow. Safe to repeat."""
    result = stand.conclusion.result
    if result.verdict in RENEWED and result.windows:
        store.put_best(renewed(stand.background, check, result, now))
    ended = store.end_check(check.id, result, key=incident_key(check, stand.background, result), channels=channels)
    return ended if ended is not None else store.check(check.id)


def renewed(background: Background, check: Check, result: CheckResult, now: datetime) -> BestEntry:
    """The entry with what the check measured; its interval holds the mean with 95 % under the check's noise."""
    entry = background.entry
    windows = role_windows(check.id, result.windows, CheckRole.WINNER)
    noise = noise_of_role(background.same_cluster, CheckRole.WINNER)
    middle = level(windows)
    half = quantile(0.975, noise) * math.sqrt(noise.variance(windows))
    return entry.model_copy(
        update={
            "id": 0,
            "superseded_at": None,
            "tokens_per_s_per_gpu": float(np.exp(middle)),
            "interval": (float(np.exp(middle - half)), float(np.exp(middle + half))),
            "repeats": sum(len(window.logs) for window in windows),
            "peak_bytes": result.peak_bytes if result.peak_bytes is not None else entry.peak_bytes,
            "fingerprint_key": check.fingerprint_key,
            "environment_key": check.environment_key,
            "measured_at": now,
        }
    )


def incident_key(check: Check, background: Background, result: CheckResult) -> str:
    """What tells incidents apart: the cause, of the cluster for causes that concern all its plans."""
    cause = result.cause
    if cause is not None and cause.kind in SHARED_CAUSES:
        return f"{background.entry.cluster.key}/{cause.kind}/{cause.subject}"
    return f"{check.series}/{cause.kind if cause else 'unknown'}"


def deadline_s(entry: BestEntry, request: ProbeRequest) -> float:
    """Seconds that a measurement may take."""
    if not isinstance(request, StepRequest):
        return PROBE_DEADLINE_S
    step_s = entry.workload.tokens_per_step / (entry.tokens_per_s_per_gpu * entry.cluster.devices)
    return min(max(PROBE_DEADLINE_S, STEPS_ALLOWED * step_s), MAX_DEADLINE_S)
