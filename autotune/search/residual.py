"""Calibration as regression: log(measured) = log(estimate(parameters)) + what plans alike share + noise.

A Gaussian process: its kernel is that of Bayesian linear regression on the parameters' slopes (search.physics), plus a
squared exponential over plan features. Rasmussen & Williams, Gaussian Processes for Machine Learning (2006), section
2.7 and algorithm 2.1; amplitude and length scale by maximal marginal likelihood over a small grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Floats = NDArray[np.float64]

FACTORS = (0.4, 0.7, 1.0, 1.5, 3.0)
"""Amplitudes that are tried, over the expected one."""

LENGTHS = (0.5, 0.7, 1.0, 1.5)
PRIOR_AMPLITUDE = 0.09
PRIOR_LENGTH = 0.65
OUTLIER = 3.0
"""Residuals of more standard deviations than this count less: their noise is taken to be what explains them."""

BLOCK = 4096  # plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Observed plans.

    Args:
        points: [k, d] features.
        slopes: [k, p] how each parameter moves the estimate.
        residuals: [k] log(measured / estimated) with all parameters at their prior means, linearised.
        noise_sd: [k] standard deviation of the measurement noise.
    """

    points: Floats
    slopes: Floats
    residuals: Floats
    noise_sd: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A conditioned process: parameters' mean and covariance, and what is needed to predict elsewhere."""

    parameters: Floats
    covariance: Floats
    amplitude: float
    length: float
    evidence: Evidence
    lower: Floats
    weights: Floats
    prior: Floats

    def predict(self, points: Floats, slopes: Floats) -> tuple[Floats, Floats]:
        """(mean of the part that plans alike share, standard deviation of the whole) at n plans.

        Args:
            points: [n, d].
            slopes: [n, p].
        """
        mean, sd = np.zeros(len(points)), np.empty(len(points))
        inverse = solve_triangular(self.lower, np.eye(len(self.lower)), lower=True) if len(self.weights) else self.lower
        for block in _blocks(len(points)):
            spread = np.einsum("np,np->n", slopes[block] @ self.prior, slopes[block]) + self.amplitude**2
            if len(self.weights):
                alike = self._kernel(points[block])
                mean[block] = self.weights @ alike
                # k is small and n large: a product with the inverse is several times faster than n substitutions.
                half = inverse @ (alike + self.evidence.slopes @ self.prior @ slopes[block].T)
                spread = np.maximum(spread - np.einsum("kn,kn->n", half, half), 1e-12)
            sd[block] = np.sqrt(spread)
        return mean, sd

    def alike(self, points: Floats) -> Floats:
        """The mean of the part that plans alike share, at n plans: `predict` without the deviation."""
        mean = np.zeros(len(points))
        if len(self.weights):
            for block in _blocks(len(points)):
                mean[block] = self.weights @ self._kernel(points[block])
        return mean

    def _kernel(self, points: Floats) -> Floats:
        kernel = _squared_distances(self.evidence.points, points)
        kernel *= -0.5 / self.length**2
        np.exp(kernel, out=kernel)
        kernel *= self.amplitude**2
        return kernel


def _blocks(count: int) -> Iterator[slice]:
    """Rows so many at a time that what is computed of them stays in a processor's cache."""
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def fit(evidence: Evidence, prior: Floats, amplitude: float = PRIOR_AMPLITUDE) -> Fit:
    """Conditions the process.

    Args:
        evidence: k observed plans; k may be 0.
        prior: [p, p] covariance of the parameters.
        amplitude: expected spread of what plans alike share; 0 if they share nothing.
    """
    count = len(evidence.residuals)
    if not count:
        empty = np.zeros((0, 0))
        return Fit(
            parameters=np.zeros(len(prior)), covariance=prior, amplitude=amplitude, length=PRIOR_LENGTH,
            evidence=evidence, lower=empty, weights=np.zeros(0), prior=prior,
        )  # fmt: skip
    squared = _squared_distances(evidence.points, evidence.points)
    linear = evidence.slopes @ prior @ evidence.slopes.T
    noise = _tempered(linear + amplitude**2 * np.exp(-0.5 * squared / PRIOR_LENGTH**2), evidence)
    amplitude, length = _constants(squared, linear, evidence.residuals, noise, amplitude)
    kernel = linear + amplitude**2 * np.exp(-0.5 * squared / length**2)
    lower = np.asarray(np.linalg.cholesky(kernel + np.diag(noise)), dtype=np.float64)
    white = solve_triangular(lower, evidence.residuals, lower=True)
    weights = solve_triangular(lower.T, white, lower=False)
    gain = solve_triangular(lower, evidence.slopes @ prior, lower=True)
    return Fit(
        parameters=prior @ evidence.slopes.T @ weights, covariance=prior - gain.T @ gain, amplitude=amplitude,
        length=length, evidence=evidence, lower=lower, weights=weights, prior=prior,
    )  # fmt: skip


def _tempered(kernel: Floats, evidence: Evidence) -> Floats:
    """Noise variances, raised where a residual is far from what all the others say of it (leave-one-out)."""
    noise = evidence.noise_sd**2 + 1e-9
    for _ in range(3):
        inverse = np.linalg.inv(kernel + np.diag(noise))
        variance = 1.0 / np.diag(inverse)
        error = (inverse @ evidence.residuals) * variance
        excess = error**2 / OUTLIER**2 - variance
        noise = np.maximum(noise, np.where(excess > 0, noise + excess, noise))
    return np.asarray(noise, dtype=np.float64)


def _squared_distances(left: Floats, right: Floats) -> Floats:
    squared = (-2.0 * left) @ right.T
    squared += np.einsum("kd,kd->k", left, left)[:, None]
    squared += np.einsum("nd,nd->n", right, right)
    return np.asarray(np.maximum(squared, 0.0, out=squared), dtype=np.float64)


def _constants(
    squared: Floats, linear: Floats, residuals: Floats, noise: Floats, expected: float
) -> tuple[float, float]:
    """The grid's best log marginal likelihood, with a log-normal prior that holds it still for few points."""
    if not expected:
        return 0.0, PRIOR_LENGTH
    best, chosen = -np.inf, (expected, PRIOR_LENGTH)
    for length in LENGTHS:
        shape = np.exp(-0.5 * squared / length**2)
        for amplitude in [expected * factor for factor in FACTORS]:
            lower = np.linalg.cholesky(linear + amplitude**2 * shape + np.diag(noise))
            white = solve_triangular(lower, residuals, lower=True)
            likelihood = -0.5 * float(white @ white) - float(np.sum(np.log(np.diag(lower))))
            likelihood -= 2.0 * np.log(amplitude / expected) ** 2 + np.log(length / PRIOR_LENGTH) ** 2
            if likelihood > best:
                best, chosen = likelihood, (amplitude, length)
    return chosen
