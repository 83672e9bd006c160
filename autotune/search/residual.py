"""A Gaussian process over log(measured / estimated): what the estimate gets wrong, learned from trials.

The kernel is a constant (the estimate may be wrong by one factor everywhere) plus a squared exponential over plan
features (it may be wrong in a way that similar plans share). Rasmussen & Williams, Gaussian Processes for Machine
Learning (2006), algorithm 2.1; amplitude and length scale by maximal marginal likelihood over a small grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OFFSET_SD = 1.0
AMPLITUDES = (0.05, 0.1, 0.2, 0.4, 0.8)
LENGTHS = (0.7, 1.5, 3.0)
PRIOR_AMPLITUDE = 0.25
PRIOR_LENGTH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Mean and standard deviation of the log residual at n points, and the constants that were chosen."""

    mean: Floats
    sd: Floats
    amplitude: float
    length: float


def posterior(points: Floats, residuals: Floats, noise_sd: Floats, at: Floats) -> Posterior:
    """Conditions the process on observed residuals.

    Args:
        points: [k, d] features of the observed plans; k may be 0.
        residuals: [k] log(measured / estimated).
        noise_sd: [k] standard deviation of each residual's measurement noise.
        at: [n, d] features of the plans to predict.
    """
    if not len(points):
        sd = np.full(len(at), np.hypot(OFFSET_SD, PRIOR_AMPLITUDE))
        return Posterior(mean=np.zeros(len(at)), sd=sd, amplitude=PRIOR_AMPLITUDE, length=PRIOR_LENGTH)
    squared = _squared_distances(points, points)
    amplitude, length = _constants(squared, residuals, noise_sd)
    lower = np.linalg.cholesky(_kernel(squared, amplitude, length) + np.diag(noise_sd**2 + 1e-9))
    cross = _kernel(_squared_distances(points, at), amplitude, length)
    half = np.linalg.solve(lower, cross)
    mean = half.T @ np.linalg.solve(lower, residuals)
    variance = OFFSET_SD**2 + amplitude**2 - np.einsum("kn,kn->n", half, half)
    return Posterior(mean=mean, sd=np.sqrt(np.maximum(variance, 1e-12)), amplitude=amplitude, length=length)


def _kernel(squared: Floats, amplitude: float, length: float) -> Floats:
    return OFFSET_SD**2 + amplitude**2 * np.exp(-0.5 * squared / length**2)


def _squared_distances(left: Floats, right: Floats) -> Floats:
    norms = np.sum(left**2, axis=1)[:, None] + np.sum(right**2, axis=1)[None, :]
    return np.asarray(np.maximum(norms - 2.0 * left @ right.T, 0.0), dtype=np.float64)


def _constants(squared: Floats, residuals: Floats, noise_sd: Floats) -> tuple[float, float]:
    """The grid's best log marginal likelihood, with a weak log-normal prior that holds it still for few points."""
    best, chosen = -np.inf, (PRIOR_AMPLITUDE, PRIOR_LENGTH)
    for amplitude in AMPLITUDES:
        for length in LENGTHS:
            covariance = _kernel(squared, amplitude, length) + np.diag(noise_sd**2 + 1e-9)
            lower = np.linalg.cholesky(covariance)
            white = np.linalg.solve(lower, residuals)
            likelihood = -0.5 * float(white @ white) - float(np.sum(np.log(np.diag(lower))))
            likelihood -= 0.5 * np.log(amplitude / PRIOR_AMPLITUDE) ** 2 + 0.5 * np.log(length / PRIOR_LENGTH) ** 2
            if likelihood > best:
                best, chosen = likelihood, (amplitude, length)
    return chosen
