"""Posterior: what is expected of every plan not yet run, from the estimates and from all that was observed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import Floats, PlanTable
from autotune.search.failures import MOST_CRASHES, p_runs
from autotune.search.peaks import peaks
from autotune.search.physics import PARAMETERS, Assumed, Supposed, behaviour, priors
from autotune.search.repeats import pooled, scatter
from autotune.search.residual import EVERYTHING, PRIOR_AMPLITUDE, Evidence, Fit, Learning, carried_prior, fit
from autotune.specs import Plan

# A trial's interval covers its own steps; the next run of the same plan differs by a little more.
REPEAT_NOISE = 0.02
PRUNED_NOISE = 0.05
# Each plan is off by something of its own too, which says nothing of the others: so much, until trials tell.
OWN_SD = 0.05
SCATTER_WEIGHT = 4.0  # repeats that REPEAT_NOISE is worth against those that were seen

HELD_UP = 0.05
"""How often a run is held up by something else, before it is seen to be slower than all others say (assumed)."""

HELD_UP_RANGE = 3.0
"""A run that is held up is slower by anything up to this (ln)."""

DOUBTED = 0.5
"""A single run that was held up more probably than this says nothing: its plan may be tried again."""
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
        crashed: it ended for a reason that may or may not be the plan's.
        final: it is not tried again, whatever it showed.
        pruned: stopped early because it could not win.
        gpu_s: GPU-seconds the trial cost.
    """

    plan: Plan
    tokens_per_s_per_gpu: float | None = None
    relative_noise: float = 0.0
    peak_bytes: float | None = None
    out_of_memory: bool = False
    crashed: bool = False
    final: bool = False
    pruned: bool = False
    gpu_s: float | None = None

    @property
    def in_flight(self) -> bool:
        """Whether nothing is known but that it runs."""
        return not (self.tokens_per_s_per_gpu or self.out_of_memory or self.crashed or self.final)

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

    `measured` counts the plans that ran to the end. `p_pays` is the probability that a trial of the plan shows what is
    expected: that it fits and does not crash, and of a plan whose only run seems to have been held up that it was.
    `suppositions` are what log throughput is a mixture of, where there are several: probability, mean, sd.
    `calibration` has each physical parameter's mean and standard deviation, ln(true / assumed).
    """

    log_mean: Floats
    log_sd: Floats
    peak_bytes: Floats
    p_fits: Floats
    p_pays: Floats
    trial_gpu_s: Floats
    barred: NDArray[np.bool_]
    best_plan: Plan | None
    best: float | None
    measured: int
    calibration: dict[str, tuple[float, float]]
    suppositions: Sequence[tuple[float, Floats, Floats]] = ()


def believe(
    table: PlanTable,
    points: Floats,
    assumed: Sequence[Assumed],
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
        assumed: their estimates, by each framework that may run them and each network that may be.
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
    supposed = _weighed(points, assumed, timed, transfers, learning)
    parts = []
    for _, each, learned in supposed:
        now = behaviour(each.estimates, learned.parameters)
        alike, shared_sd = learned.predict(points, now.slopes)
        parts.append((now.log_time + alike, np.hypot(shared_sd, learned.own)))
    weights = np.array([weight for weight, *_ in supposed])
    log_time, log_sd = _mixed(weights, [mean for mean, _ in parts], [sd for _, sd in parts])
    taught = [item for item in transfers if item.log_peak is not None and item.shares]
    p_fits, peak_bytes = np.zeros(len(table)), np.zeros(len(table))
    as_read = {each.estimates.framework: each.estimates for each in assumed if each.slower == 1.0}
    for one in {each.estimates.framework: as_read[each.estimates.framework] for _, each, _ in supposed}.values():
        memory = peaks(
            points,
            one,
            measured=[(i, item.peak_bytes) for i, item in seen if item.peak_bytes],
            out_of_memory=[i for i, item in seen if item.out_of_memory],
            shares=np.array([item.shares for item in taught], dtype=np.float64),
            log_peaks=np.array([item.log_peak for item in taught], dtype=np.float64),
            learning=learning,
        )
        weight = sum(weight for weight, each, _ in supposed if each.estimates.framework == one.framework)
        p_fits, peak_bytes = p_fits + weight * memory.p_fits, peak_bytes + weight * memory.reserved_bytes
    p_fits = np.minimum(p_fits, 1.0) if learning.p_fits else np.ones(len(table))
    crashed = [i for i, item in seen if item.crashed]
    p_pays = p_fits * p_runs(table, crashed, [i for i, item in seen if item.tokens_per_s_per_gpu or item.out_of_memory])
    barred = np.zeros(len(table), dtype=np.bool_)
    barred[[i for i, item in seen if not item.crashed or item.final or crashed.count(i) >= MOST_CRASHES]] = True
    learned_mean, learned_sd = _mixed(
        weights,
        [each.shift + learned.parameters for _, each, learned in supposed],
        [np.sqrt(np.diag(learned.covariance)) for *_, learned in supposed],
    )
    speed = float(np.log(assumed[0].estimates.tokens_per_step / devices))
    log_mean = speed - log_time
    runs: dict[int, list[float]] = {}
    for i, item in timed:
        if item.tokens_per_s_per_gpu:
            runs.setdefault(i, []).append(item.tokens_per_s_per_gpu)
    doubted = _held_up(runs, log_mean, log_sd) if len(runs) > 1 else {}
    noise = repeat_noise(runs.values())
    means: dict[int, float] = {}
    for i in {i for i, item in timed if item.whole}:
        means[i] = pooled(runs[i])
        if i not in doubted:  # what was measured is known, whatever the others say
            log_mean[i], log_sd[i] = np.log(means[i]), noise
    kept = {i for i, item in seen if item.in_flight or item.final}
    for i, p in doubted.items():
        barred[i], p_pays[i] = i in kept, p_pays[i] * p
    best_row = max(means, key=lambda i: means[i], default=None)
    return Posterior(
        log_mean=log_mean,
        log_sd=log_sd,
        peak_bytes=peak_bytes,
        p_fits=p_fits,
        p_pays=p_pays,
        trial_gpu_s=devices * (setup_s + steps * np.exp(log_time)),
        barred=barred,
        best_plan=None if best_row is None else table.plan(best_row),
        best=None if best_row is None else means[best_row],
        measured=len(means),
        calibration={name: (float(learned_mean[i]), float(learned_sd[i])) for i, name in enumerate(PARAMETERS)},
        suppositions=[
            (float(weight), speed - mean, sd)
            for weight, (mean, sd) in zip(weights, parts, strict=True)
            if len(parts) > 1
        ],
    )


def repeat_noise(runs: Iterable[Sequence[float]]) -> float:
    """How far the runs of a plan are apart (ln): as usual, until repeats tell."""
    several = [speeds for speeds in runs if len(speeds) > 1]
    seen = scatter(several)
    if seen is None:
        return REPEAT_NOISE
    freedom = sum(len(speeds) - 1 for speeds in several)
    return float(np.sqrt((SCATTER_WEIGHT * REPEAT_NOISE**2 + freedom * seen**2) / (SCATTER_WEIGHT + freedom)))


def _held_up(runs: dict[int, list[float]], log_mean: Floats, log_sd: Floats) -> dict[int, float]:
    """Rows whose only run something held up, more probably than not, and that probability.

    Nothing makes a run faster than its plan is, so only slow ones are doubted.
    """
    found = {}
    for i, speeds in runs.items():
        behind = float(log_mean[i] - np.log(speeds[0]))
        if len(speeds) == 1 and 0.0 < behind < HELD_UP_RANGE:
            sd = float(log_sd[i])
            usual = float(np.exp(-0.5 * (behind / sd) ** 2)) / (sd * np.sqrt(2.0 * np.pi))
            p = HELD_UP / HELD_UP_RANGE / (HELD_UP / HELD_UP_RANGE + (1.0 - HELD_UP) * usual)
            if p > DOUBTED:
                found[i] = p
    return found


NEGLIGIBLE = 0.003
"""What is less probable than this, beside the most probable, is left out."""


def _weighed(
    points: Floats,
    assumed: Sequence[Assumed],
    timed: Sequence[tuple[int, Observation]],
    transfers: Sequence[TransferObservation],
    learning: Learning,
) -> list[tuple[float, Assumed, Fit]]:
    """(probability, what is assumed, fit) of each assumption under each prior, by the evidence of what was measured."""
    found = []
    for each in assumed if learning.calibration else [item for item in assumed if item.slower == 1.0]:
        supposed = priors(each, _errors(each.estimates, timed, transfers))
        for prior in supposed if learning.calibration else supposed[:1]:
            learned = calibrated(points, each, timed, transfers, learning, prior)
            known = float(np.log(prior.probability * each.probability * _in_use(each.estimates)))
            found.append((known + learned.log_evidence, each, learned))
    most = max(log for log, *_ in found)
    kept = [(float(np.exp(log - most)), each, learned) for log, each, learned in found]
    kept = [item for item in kept if item[0] >= NEGLIGIBLE]
    total = sum(weight for weight, *_ in kept)
    return [(weight / total, each, learned) for weight, each, learned in kept]


OLD = frozenset({"megatron-2021", "megatron-deepspeed"})
OLD_SHARE = 0.02


def _in_use(estimates: EstimateTable) -> float:
    """How probably a framework runs the plans, over the others, where nobody said: hardly one that was replaced."""
    return OLD_SHARE if estimates.framework.name in OLD else 1.0


def _mixed(weights: Floats, means: Sequence[Floats], spreads: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Mean and standard deviation of a mixture."""
    if len(weights) == 1:
        return means[0], spreads[0]
    mean = np.asarray(weights @ np.stack(means), dtype=np.float64)
    square = weights @ np.stack([sd**2 + (each - mean) ** 2 for each, sd in zip(means, spreads, strict=True)])
    return mean, np.sqrt(square)


def _errors(
    estimates: EstimateTable, timed: Sequence[tuple[int, Observation]], transfers: Sequence[TransferObservation]
) -> Floats:
    """ln(measured / estimated) of all transfers and trials."""
    rows = np.array([i for i, _ in timed], dtype=np.intp)
    slower = [-item.log_speed for item in transfers if item.log_speed is not None]
    return np.concatenate([slower, _log_times(estimates, timed) - np.log(estimates.step_time_s[rows])])


def _log_times(estimates: EstimateTable, timed: Sequence[tuple[int, Observation]]) -> Floats:
    found = np.log([estimates.tokens_per_step / (item.tokens_per_s_per_gpu or 1.0) for _, item in timed])
    return np.asarray(found - np.log(estimates.devices), dtype=np.float64)


def calibrated(
    points: Floats,
    assumed: Assumed,
    timed: Sequence[tuple[int, Observation]],
    transfers: Sequence[TransferObservation],
    learning: Learning = EVERYTHING,
    prior: Supposed | None = None,
) -> Fit:
    """The physical parameters and the residual, from trials and transfers.

    Gauss-Newton: the step time is linearised at the present parameters until they move no more.

    Args:
        points: features of the plans.
        assumed: estimates of the plans.
        timed: (row, what was measured).
        transfers: of other tunings.
        learning: the parts that learn.
        prior: of the parameters before any of it; the likeliest of `priors` by default.
    """
    estimates = assumed.estimates
    rows = np.array([i for i, _ in timed], dtype=np.intp)
    log_measured = _log_times(estimates, timed)
    taught = [item for item in transfers if item.log_speed is not None]
    slower = np.array([-(item.log_speed or 0.0) for item in taught], dtype=np.float64)
    unknown = (1.0,) + (0.0,) * (len(PARAMETERS) - 1)  # a transfer without slopes counts for all parameters alike
    supposed = prior or priors(assumed, _errors(estimates, timed, transfers))[0]
    slopes = np.array([item.slopes or unknown for item in taught], dtype=np.float64).reshape(-1, len(PARAMETERS))
    noise = np.array([item.noise for item in taught], dtype=np.float64)
    mean, covariance = carried_prior(slopes, slower - slopes @ assumed.shift, noise, supposed.covariance)
    if not learning.calibration:
        mean, covariance = np.zeros_like(mean), np.zeros_like(covariance)
    amplitude = PRIOR_AMPLITUDE if learning.residual else 0.0
    measured = np.array([max(item.relative_noise, 0.0) / 2.0 for _, item in timed], dtype=np.float64)
    repeats = np.array([PRUNED_NOISE if item.pruned else REPEAT_NOISE for _, item in timed], dtype=np.float64)
    noise = np.hypot(measured, repeats)
    parameters = mean
    for _ in range(MAX_ROUNDS):
        now = behaviour(estimates, parameters, rows)
        residuals = log_measured - now.log_time + now.slopes @ (parameters - mean)
        evidence = Evidence(points=points[rows], slopes=now.slopes, residuals=residuals, noise_sd=noise)
        found = fit(evidence, covariance, amplitude, OWN_SD)
        moved = mean + found.parameters - parameters
        parameters = parameters + np.clip(moved, -1.0, 1.0)
        if not len(rows) or float(np.abs(moved).max()) < SETTLED:
            break
    return replace(found, parameters=parameters)
