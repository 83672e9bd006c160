"""Belief: what is expected of every plan not yet run, from the estimates and from all that was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import PlanTable
from autotune.search.features import features
from autotune.search.residual import Posterior, posterior
from autotune.specs import Plan

Floats = NDArray[np.float64]

# A trial's interval covers its own steps; the next run of the same plan differs by a little more.
REPEAT_NOISE = 0.02
PRUNED_NOISE = 0.05
# The spread of log(measured / estimated peak memory) before anything was measured, and the least it can become.
MEMORY_PRIOR_SD = 0.15
MEMORY_PRIOR_WEIGHT = 2.0
MEMORY_LEAST_SD = 0.02
# An estimate is off by a different factor on another model, cluster size or workload; by how much, roughly.
LESSON_NOISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one trial showed. A failure that says nothing about the plan's speed or memory is `barred` only.

    Args:
        plan: the plan that ran.
        tokens_per_s_per_gpu: measured, or None where the trial failed.
        relative_noise: half width of the interval over the mean.
        peak_bytes: measured peak of the worst rank, or None.
        out_of_memory: it really ran out of memory.
        pruned: stopped early because it could not win.
        gpu_s: GPU-seconds the trial cost.
    """

    plan: Plan
    tokens_per_s_per_gpu: float | None = None
    relative_noise: float = 0.0
    peak_bytes: float | None = None
    out_of_memory: bool = False
    pruned: bool = False
    gpu_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What another tuning showed of a plan: how far its estimate was off there. It bars nothing and is no best.

    Args:
        plan: the plan that ran, on another model, cluster size or workload.
        log_speed: ln(measured / estimated) throughput, None where it failed.
        log_peak: ln(measured / estimated) peak memory, None where it is unknown; after an OOM at least
            ln(capacity / estimated).
        noise: standard deviation of log_speed as evidence for this tuning.
    """

    plan: Plan
    log_speed: float | None = None
    log_peak: float | None = None
    noise: float = LESSON_NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Per plan of a table: log throughput (mean, sd), expected peak, probability to fit, a trial's GPU-seconds."""

    log_mean: Floats
    log_sd: Floats
    peak_bytes: Floats
    p_fits: Floats
    trial_gpu_s: Floats
    barred: NDArray[np.bool_]
    best_plan: Plan | None
    best: float | None


def believe(
    table: PlanTable,
    estimates: EstimateTable,
    observations: Sequence[Observation],
    *,
    lessons: Sequence[Lesson] = (),
    capacity_bytes: float,
    devices: int,
    setup_s: float,
    steps: int,
) -> Belief:
    """Joins estimates with observations.

    Args:
        table: n plans; observations of plans outside it are ignored.
        estimates: their estimates.
        observations: everything told so far.
        lessons: of other tunings.
        capacity_bytes: a device's memory.
        devices: N.
        setup_s: expected seconds of a trial's set-up.
        steps: steps that a trial runs.
    """
    rows_of = {plan: table.find(plan) for plan in {item.plan for item in observations}}
    seen = [(row, item) for item in observations if (row := rows_of[item.plan]) is not None]
    timed = [(i, item) for i, item in seen if item.tokens_per_s_per_gpu]
    rows = np.array([i for i, _ in timed], dtype=np.int64)
    measured = np.array([item.tokens_per_s_per_gpu for _, item in timed], dtype=np.float64)
    log_estimate = np.log(estimates.tokens_per_s_per_gpu)
    learned = _learned(table, rows, np.log(measured) - log_estimate[rows], [_noise(item) for _, item in timed], lessons)
    peak_bytes, p_fits = _memory(estimates.peak_memory_bytes, seen, lessons, capacity_bytes)
    barred = np.zeros(len(table), dtype=np.bool_)
    barred[[i for i, _ in seen]] = True
    best_plan, best = _best(timed)
    scale = np.exp(np.median(log_estimate[rows] - np.log(measured))) if len(rows) else 1.0
    return Belief(
        log_mean=log_estimate + learned.mean,
        log_sd=learned.sd,
        peak_bytes=peak_bytes,
        p_fits=p_fits,
        trial_gpu_s=devices * (setup_s + steps * estimates.step_time_s * scale),
        barred=barred,
        best_plan=best_plan,
        best=best,
    )


def _learned(
    table: PlanTable, rows: NDArray[np.int64], residuals: Floats, noise: Sequence[float], lessons: Sequence[Lesson]
) -> Posterior:
    """The residual of every plan, from those observed at `rows` and from lessons."""
    points = features(table)
    taught = [(item.plan, item.log_speed, item.noise) for item in lessons if item.log_speed is not None]
    elsewhere = features(PlanTable.of([plan for plan, _, _ in taught]))
    return posterior(
        np.concatenate([points[rows], elsewhere]),
        np.concatenate([residuals, np.array([value for _, value, _ in taught], dtype=np.float64)]),
        np.array([*noise, *(sd for _, _, sd in taught)], dtype=np.float64),
        points,
    )


def _noise(item: Observation) -> float:
    return float(np.hypot(max(item.relative_noise, 0.0) / 2.0, PRUNED_NOISE if item.pruned else REPEAT_NOISE))


def _best(timed: Sequence[tuple[int, Observation]]) -> tuple[Plan | None, float | None]:
    """The plan with the highest mean over its complete trials."""
    values: dict[Plan, list[float]] = {}
    for _, item in timed:
        if not item.pruned and item.tokens_per_s_per_gpu:
            values.setdefault(item.plan, []).append(item.tokens_per_s_per_gpu)
    if not values:
        return None, None
    means = {plan: float(np.mean(found)) for plan, found in values.items()}
    plan = max(means, key=lambda key: means[key])
    return plan, means[plan]


def _memory(
    estimated_bytes: Floats, seen: Sequence[tuple[int, Observation]], lessons: Sequence[Lesson], capacity_bytes: float
) -> tuple[Floats, Floats]:
    """(expected peak, P(peak <= capacity)), with log(measured / estimated) normal: a conjugate update of its mean and
    spread.

    A real OOM tells only that the peak lay above the capacity: it enters as just above it, where the present
    belief would have placed it lower.
    """
    ratios = [np.log(item.peak_bytes / estimated_bytes[i]) for i, item in seen if item.peak_bytes]
    ratios += [
        float(np.log(1.03 * capacity_bytes / estimated_bytes[i]))
        for i, item in seen
        if item.out_of_memory and estimated_bytes[i] < 1.03 * capacity_bytes
    ]
    ratios += [item.log_peak for item in lessons if item.log_peak is not None]
    count = len(ratios)
    mean = float(np.sum(ratios)) / (count + MEMORY_PRIOR_WEIGHT)
    squares = float(np.sum((np.asarray(ratios) - mean) ** 2)) if count else 0.0
    variance = (MEMORY_PRIOR_WEIGHT * MEMORY_PRIOR_SD**2 + squares) / (count + MEMORY_PRIOR_WEIGHT)
    sd = max(float(np.sqrt(variance)), MEMORY_LEAST_SD)
    margin = np.log(capacity_bytes) - np.log(estimated_bytes) - mean
    return estimated_bytes * np.exp(mean), np.asarray(ndtr(margin / sd), dtype=np.float64)
