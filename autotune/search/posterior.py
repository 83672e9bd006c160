"""Posterior: what is expected of every plan not yet run, from the estimates and from all that was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import Floats, PlanTable
from autotune.search.peaks import peaks
from autotune.search.physics import PARAMETERS, behaviour, prior_covariance
from autotune.search.residual import EVERYTHING, PRIOR_AMPLITUDE, Evidence, Fit, Learning, carried_prior, fit
from autotune.specs import Plan

# A trial's interval covers its own steps; the next run of the same plan differs by a little more.
REPEAT_NOISE = 0.02
PRUNED_NOISE = 0.05
# Each plan is off by something of its own too, which says nothing of the others.
OWN_SD = 0.05
MAX_ROUNDS, SETTLED = 5, 0.01
# An estimate is off by a different factor on another model, cluster size or workload; by how much, roughly.
TRANSFER_NOISE = 0.1


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

    @property
    def whole(self) -> bool:
        """Whether the plan's whole step was measured to the end."""
        return bool(self.tokens_per_s_per_gpu) and not self.pruned


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferObservation:
    """What another tuning showed of a plan: how far its estimate was off there. It bars nothing and is no best.

    Args:
        plan: the plan that ran, on another model, cluster size or workload.
        log_speed: ln(measured / estimated) throughput, None where it failed.
        slopes: how each physical parameter moves the estimate's step time there (search.physics); empty if unknown.
        log_peak: ln(measured / estimated) peak memory, None where it is unknown; after an OOM at least
            ln(capacity / estimated).
        shares: what each memory parameter's term is of the estimated peak (search.peaks); empty if unknown.
        noise: standard deviation of log_speed as evidence for this tuning.
    """

    plan: Plan
    log_speed: float | None = None
    slopes: tuple[float, ...] = ()
    log_peak: float | None = None
    shares: tuple[float, ...] = ()
    noise: float = TRANSFER_NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Per plan of a table: log throughput (mean, sd), expected peak, probability to fit, a trial's GPU-seconds.

    `calibration` has each physical parameter's mean and standard deviation, ln(true / assumed).
    """

    log_mean: Floats
    log_sd: Floats
    peak_bytes: Floats
    p_fits: Floats
    trial_gpu_s: Floats
    barred: NDArray[np.bool_]
    best_plan: Plan | None
    best: float | None
    calibration: dict[str, tuple[float, float]]


def believe(
    table: PlanTable,
    points: Floats,
    estimates: EstimateTable,
    observations: Sequence[Observation],
    *,
    transfers: Sequence[TransferObservation] = (),
    devices: int,
    setup_s: float,
    steps: int,
    learning: Learning = EVERYTHING,
) -> Posterior:
    """Joins estimates with observations.

    Args:
        table: n plans; observations of plans outside it are ignored.
        points: their features.
        estimates: their estimates.
        observations: everything told so far.
        transfers: of other tunings.
        devices: N.
        setup_s: expected seconds of a trial's set-up.
        steps: steps that a trial runs.
        learning: the parts that learn.
    """
    rows_of = {plan: table.find(plan) for plan in {item.plan for item in observations}}
    seen = [(row, item) for item in observations if (row := rows_of[item.plan]) is not None]
    timed = [(i, item) for i, item in seen if item.tokens_per_s_per_gpu]
    learned = calibrated(points, estimates, timed, transfers, learning)
    now = behaviour(estimates, learned.parameters)
    alike, shared_sd = learned.predict(points, now.slopes)
    log_time = now.log_time + alike
    taught = [item for item in transfers if item.log_peak is not None and item.shares]
    memory = peaks(
        points,
        estimates,
        measured=[(i, item.peak_bytes) for i, item in seen if item.peak_bytes],
        out_of_memory=[i for i, item in seen if item.out_of_memory],
        shares=np.array([item.shares for item in taught], dtype=np.float64),
        log_peaks=np.array([item.log_peak for item in taught], dtype=np.float64),
        learning=learning,
    )
    barred = np.zeros(len(table), dtype=np.bool_)
    barred[[i for i, _ in seen]] = True
    spread = np.sqrt(np.diag(learned.covariance))
    log_mean, log_sd = np.log(estimates.tokens_per_step / devices) - log_time, np.hypot(shared_sd, OWN_SD)
    runs: dict[Plan, list[float]] = {}
    for i, item in timed:
        if item.whole and item.tokens_per_s_per_gpu:  # what was measured is known, whatever the others say
            log_mean[i], log_sd[i] = np.log(item.tokens_per_s_per_gpu), REPEAT_NOISE
            runs.setdefault(item.plan, []).append(item.tokens_per_s_per_gpu)
    means = {plan: float(np.mean(found)) for plan, found in runs.items()}
    best_plan = max(means, key=lambda plan: means[plan], default=None)
    return Posterior(
        log_mean=log_mean,
        log_sd=log_sd,
        peak_bytes=memory.reserved_bytes,
        p_fits=memory.p_fits if learning.p_fits else np.ones(len(table)),
        trial_gpu_s=devices * (setup_s + steps * np.exp(log_time)),
        barred=barred,
        best_plan=best_plan,
        best=None if best_plan is None else means[best_plan],
        calibration={name: (float(learned.parameters[i]), float(spread[i])) for i, name in enumerate(PARAMETERS)},
    )


def calibrated(
    points: Floats,
    estimates: EstimateTable,
    timed: Sequence[tuple[int, Observation]],
    transfers: Sequence[TransferObservation],
    learning: Learning = EVERYTHING,
) -> Fit:
    """The physical parameters and the residual, from trials and transfers.

    Gauss-Newton: the step time is linearised at the present parameters until they move no more.
    """
    rows = np.array([i for i, _ in timed], dtype=np.intp)
    log_measured = np.log([estimates.tokens_per_step / (item.tokens_per_s_per_gpu or 1.0) for _, item in timed])
    log_measured = np.asarray(log_measured, dtype=np.float64) - np.log(estimates.devices)
    taught = [item for item in transfers if item.log_speed is not None]
    slower = np.array([-(item.log_speed or 0.0) for item in taught], dtype=np.float64)
    unknown = (1.0,) + (0.0,) * (len(PARAMETERS) - 1)  # a transfer without slopes counts for all parameters alike
    errors = np.concatenate([slower, log_measured - np.log(estimates.step_time_s[rows])])
    mean, prior = carried_prior(
        np.array([item.slopes or unknown for item in taught], dtype=np.float64).reshape(-1, len(PARAMETERS)),
        slower,
        np.array([item.noise for item in taught], dtype=np.float64),
        prior_covariance(estimates, errors),
    )
    if not learning.calibration:
        mean, prior = np.zeros_like(mean), np.zeros_like(prior)
    amplitude = PRIOR_AMPLITUDE if learning.residual else 0.0
    measured = np.array([max(item.relative_noise, 0.0) / 2.0 for _, item in timed], dtype=np.float64)
    repeats = np.array([PRUNED_NOISE if item.pruned else REPEAT_NOISE for _, item in timed], dtype=np.float64)
    noise = np.hypot(np.hypot(measured, repeats), OWN_SD)
    parameters = mean
    for _ in range(MAX_ROUNDS):
        now = behaviour(estimates, parameters, rows)
        residuals = log_measured - now.log_time + now.slopes @ (parameters - mean)
        evidence = Evidence(points=points[rows], slopes=now.slopes, residuals=residuals, noise_sd=noise)
        found = fit(evidence, prior, amplitude)
        moved = mean + found.parameters - parameters
        parameters = parameters + np.clip(moved, -1.0, 1.0)
        if not len(rows) or float(np.abs(moved).max()) < SETTLED:
            break
    return replace(found, parameters=parameters)
