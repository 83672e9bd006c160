"""Memory learned from trials: how far the predicted peak is off, by what it is made of, and whether a plan fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.capacity import p_fits
from autotune.cost.estimate import EstimateTable
from autotune.cost.table import Floats
from autotune.search.residual import EVERYTHING, Evidence, Fit, Learning, carried_prior, fit

PRIOR_SD = {"all": 0.03, "activations": 0.06, "gathered": 0.3, "fragmentation": 0.3, "optimizer": 0.1}
"""Standard deviation of ln(measured / predicted) of each term before anything was measured."""

AMPLITUDE = 0.10
"""Spread of what similar plans share beyond that."""

PEAK_NOISE = 0.08
"""What a plan's peak is off by on its own: allocators scatter, and it says nothing of other plans."""

OOM_NOISE = 0.05

TRANSFERRED_PEAK_NOISE = 0.1
"""Another tuning's peak as evidence for this one."""

LIMIT_SD = 0.06
"""How sharply (ln) plans of a known peak begin to run out of memory around `capacity_bytes`."""

HARMLESS = 0.5
"""Share of a peak's deviation from its prediction that is cache: an allocator gives it back before it fails."""

SAFE = 0.98
"""From this probability on a plan is safe to be recommended without a trial."""

NOTHING = Evidence(points=np.zeros((0, 0)), slopes=np.zeros((0, 0)), residuals=np.zeros(0), noise_sd=np.zeros(0))


@dataclass(frozen=True, eq=False, slots=True)
class Peaks:
    """Expected reserved bytes and the probability that they fit, [n]."""

    reserved_bytes: Floats
    p_fits: Floats


def term_shares(estimates: EstimateTable) -> Floats:
    """What each parameter's term is of the predicted reserved bytes, [n, parameters]."""
    parts, reserved = estimates.bytes, np.maximum(estimates.reserved_bytes, 1.0)
    columns = [reserved, parts.activations + parts.logits, parts.gathered, parts.fragmentation, parts.optimizer]
    return (np.stack(columns) / reserved).T


def peaks(
    points: Floats,
    estimates: EstimateTable,
    *,
    measured: Sequence[tuple[int, float]],
    out_of_memory: Sequence[int],
    shares: Floats,
    log_peaks: Floats,
    learning: Learning = EVERYTHING,
) -> Peaks:
    """Joins predicted peaks with measured ones.

    A real OOM tells only that the peak lay above what the device can hold: it enters as just above it, where the
    measured peaks alone would have placed it lower.

    Args:
        points: [n, d] features of the plans.
        estimates: of the plans.
        measured: (row, bytes reserved).
        out_of_memory: rows.
        shares: [l, parameters] terms of plans of other tunings.
        log_peaks: [l] ln(measured / predicted) of their peaks.
        learning: the parts that learn.
    """
    slopes = term_shares(estimates)
    spread = np.diag(np.array(list(PRIOR_SD.values())) ** 2)
    doubt = max(estimates.memory_sd**2 - LIMIT_SD**2, 0.0)  # of a framework whose memory is less well known
    spread[0, 0] += doubt
    noise_sd = np.full(len(log_peaks), TRANSFERRED_PEAK_NOISE)
    carried, prior = carried_prior(shares.reshape(-1, slopes.shape[1]), log_peaks, noise_sd, spread)
    if not learning.calibration:
        carried, prior = np.zeros_like(carried), np.zeros_like(prior)
    amplitude = AMPLITUDE if learning.residual else 0.0
    predicted = np.log(np.maximum(estimates.reserved_bytes, 1.0)) + slopes @ carried
    limit = float(np.log(estimates.capacity_bytes))
    needed = np.log(np.maximum(estimates.needed_bytes - estimates.overhead_bytes, 1.0)) + slopes @ carried
    rows = np.array([i for i, _ in measured], dtype=np.intp)
    residuals = np.log(np.array([found for _, found in measured], dtype=np.float64)) - predicted[rows]

    def conditioned(rows: NDArray[np.intp], residuals: Floats, noise: Sequence[float]) -> Fit:
        evidence = Evidence(points=points[rows], slopes=slopes[rows], residuals=residuals, noise_sd=np.array(noise))
        return fit(evidence, prior, amplitude)

    noise = [PEAK_NOISE] * len(rows)
    found = conditioned(rows, residuals, noise)
    if out_of_memory:
        failed = np.array(out_of_memory, dtype=np.intp)
        mean = needed[failed] + slopes[failed] @ found.parameters + found.alike(points[failed])
        failed = failed[mean < limit + OOM_NOISE]
        rows = np.concatenate([rows, failed])
        residuals = np.concatenate([residuals, limit + OOM_NOISE - needed[failed]])
        found = conditioned(rows, residuals, noise + [OOM_NOISE] * len(failed))
    alike, sd = found.predict(points, slopes)
    shift = slopes @ found.parameters + alike
    needed = needed + (1.0 - HARMLESS) * shift
    _, before = fit(NOTHING, spread, amplitude).predict(points, slopes)
    left = (sd / before) ** 2 if learning.calibration else np.ones(len(points))  # of the doubt, after what was measured
    own = np.sqrt(LIMIT_SD**2 + doubt * left)
    return Peaks(np.exp(predicted + shift), p_fits(np.exp(needed), float(np.exp(limit)), own))
