"""Calibration as regression: log(measured) = log(estimate(parameters)) + what plans alike share + noise.

A Gaussian process: its kernel is that of Bayesian linear regression on the parameters' slopes (search.physics), plus a
squared exponential over plan features. Rasmussen & Williams, Gaussian Processes for Machine Learning (2006), section
2.7 and algorithm 2.1; amplitude and length scale by maximal marginal likelihood over a small grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from autotune.cost.table import Floats, PlanTable

FACTORS = (0.4, 0.7, 1.0, 1.5, 3.0)
"""Amplitudes that are tried, over the expected one."""

LENGTHS = (0.5, 0.7, 1.0, 1.5)
PRIOR_AMPLITUDE = 0.09
PRIOR_LENGTH = 0.65
OUTLIER = 3.0
"""Residuals of more standard deviations than this count less: their noise is taken to be what explains them."""

OWN_FACTORS = (0.7, 1.0, 1.5, 2.2, 3.3)
"""Spreads of a plan's own deviation that are tried, over the expected one."""

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
    own: float = 0.0
    log_evidence: float = 0.0

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


def fit(
    evidence: Evidence, prior: Floats, amplitude: float = PRIOR_AMPLITUDE, own: float = 0.0, *, tune: bool = True
) -> Fit:
    """Conditions the process.

    Args:
        evidence: k observed plans; k may be 0.
        prior: [p, p] covariance of the parameters.
        amplitude: expected spread of what plans alike share; 0 if they share nothing.
        own: expected spread of what each plan has to itself, beyond the noise; 0 if the noise has it all.
    """
    count = len(evidence.residuals)
    if not count:
        empty = np.zeros((0, 0))
        return Fit(
            parameters=np.zeros(len(prior)), covariance=prior, amplitude=amplitude, length=PRIOR_LENGTH,
            evidence=evidence, lower=empty, weights=np.zeros(0), prior=prior, own=own,
        )  # fmt: skip
    squared = _squared_distances(evidence.points, evidence.points)
    linear = evidence.slopes @ prior @ evidence.slopes.T
    noise = _tempered(linear + amplitude**2 * np.exp(-0.5 * squared / PRIOR_LENGTH**2), evidence, own)
    amplitude, length = _constants(squared, linear, evidence.residuals, noise, amplitude)
    kernel = linear + amplitude**2 * np.exp(-0.5 * squared / length**2)
    noise, own = _own(kernel, evidence.residuals, noise, own)
    lower = np.asarray(np.linalg.cholesky(kernel + np.diag(noise)), dtype=np.float64)
    white = solve_triangular(lower, evidence.residuals, lower=True)
    weights = solve_triangular(lower.T, white, lower=False)
    gain = solve_triangular(lower, evidence.slopes @ prior, lower=True)
    return Fit(
        parameters=prior @ evidence.slopes.T @ weights, covariance=prior - gain.T @ gain, amplitude=amplitude,
        length=length, evidence=evidence, lower=lower, weights=weights, prior=prior, own=own,
        log_evidence=-0.5 * float(white @ white) - float(np.sum(np.log(np.diag(lower)))),
    )  # fmt: skip


def _tempered(kernel: Floats, evidence: Evidence, own: float) -> Floats:
    """Noise variances, raised where a residual is far from what all the others say of it (leave-one-out)."""
    noise = evidence.noise_sd**2 + own**2 + 1e-9
    for _ in range(3):
        inverse = np.linalg.inv(kernel + np.diag(noise))
        variance = 1.0 / np.diag(inverse)
        error = (inverse @ evidence.residuals) * variance
        excess = error**2 / OUTLIER**2 - variance
        noise = np.maximum(noise, np.where(excess > 0, noise + excess, noise))
    return np.asarray(noise, dtype=np.float64)


def _own(kernel: Floats, residuals: Floats, noise: Floats, expected: float) -> tuple[Floats, float]:
    """(noise variances, spread of plans' own deviations) of the best log marginal likelihood, held still for few."""
    if not expected:
        return noise, 0.0
    tried = np.array([expected * factor for factor in OWN_FACTORS])
    added = (tried**2 - expected**2)[:, None, None] * np.eye(len(residuals))
    likelihood = _log_likelihood(kernel + np.diag(noise) + added, residuals) - 2.0 * np.log(tried / expected) ** 2
    chosen = float(tried[np.argmax(likelihood)])
    return noise + chosen**2 - expected**2, chosen


def _log_likelihood(covariances: Floats, residuals: Floats) -> Floats:
    """Of the residuals under each covariance, [c] of [c, k, k], but for a constant."""
    lower = np.linalg.cholesky(covariances)
    white = np.linalg.solve(lower, residuals[None, :, None])[..., 0]
    return np.asarray(
        -0.5 * np.sum(white**2, axis=1) - np.sum(np.log(np.diagonal(lower, axis1=1, axis2=2)), axis=1),
        dtype=np.float64,
    )


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
    tried = np.array([(expected * factor, length) for length in LENGTHS for factor in FACTORS])
    amplitudes, lengths = tried.T
    shared = amplitudes[:, None, None] ** 2 * np.exp(-0.5 * squared / lengths[:, None, None] ** 2)
    likelihood = _log_likelihood(linear + np.diag(noise) + shared, residuals)
    likelihood -= 2.0 * np.log(amplitudes / expected) ** 2 + np.log(lengths / PRIOR_LENGTH) ** 2
    amplitude, length = tried[np.argmax(likelihood)]
    return float(amplitude), float(length)


# Plans as points: what makes two plans similar, for the Gaussian process that learns what the estimate misses.

# Degrees enter as log2: a doubling is one unit, whatever the degree. A switch is worth this many units.
ZERO_UNITS = 1.0
RECOMPUTE_UNITS = 1.5
SEQUENCE_PARALLEL_UNITS = 1.0
SCHEDULE_UNITS = 1.0


def features(table: PlanTable) -> Floats:
    """One row of 16 numbers a plan, in units of doublings.

    Args:
        table: n plans.

    Returns:
        float64 [n, 16].
    """
    degrees = (table.tp, table.pp, table.dp, table.cp, table.ep, table.vpp, table.micro_batch)
    columns = [np.log2(column.astype(np.float64)) for column in degrees]
    columns += [(table.zero_stage == stage) * (ZERO_UNITS / np.sqrt(2)) for stage in range(4)]
    columns += [(table.recompute == code) * (RECOMPUTE_UNITS / np.sqrt(2)) for code in (1, 2)]
    columns.append(table.sequence_parallel * SEQUENCE_PARALLEL_UNITS)
    columns += [(table.schedule == code) * (SCHEDULE_UNITS / np.sqrt(2)) for code in (0, 2)]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


# What other tunings taught, as the prior of this one: transfers move the parameters, with more doubt than own trials.

BETWEEN = 0.5
"""Spread of a parameter between two tunings on such clusters, over its prior one: however many transfers there
are, this much doubt stays."""

CARRIED_OUTLIER = 2.5
CARRIED_ROUNDS = 4


def carried_prior(slopes: Floats, residuals: Floats, noise_sd: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """(mean, covariance) of the parameters after the transfers: Bayesian linear regression that discounts outliers.

    Args:
        slopes: [transfers, parameters].
        residuals: [transfers] ln(measured / estimated).
        noise_sd: [transfers].
        prior: [parameters, parameters] covariance around zero.
    """
    if not len(residuals):
        return np.zeros(len(prior)), prior
    precision, noise = np.linalg.inv(prior), noise_sd**2
    mean, covariance = np.zeros(len(prior)), np.array(prior)
    for _ in range(CARRIED_ROUNDS):
        weighted = slopes / noise[:, None]
        covariance = np.asarray(np.linalg.inv(precision + weighted.T @ slopes), dtype=np.float64)
        mean = covariance @ (weighted.T @ residuals)
        error = np.abs(residuals - slopes @ mean)
        noise = np.maximum(noise_sd, error / CARRIED_OUTLIER) ** 2
    return mean, covariance + BETWEEN**2 * prior


# What a search learns by: each part can be switched off, to show what it is worth (`autotune backtest --without`).


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The parts of learning, all on by default.

    Args:
        calibration: the physical parameters of time and memory learn; without, they stay as assumed, and certain.
        residual: what similar plans share beyond them is learned; without, only the parameters learn.
        p_fits: plans are weighed by their probability to fit; without, every plan is believed to fit.
    """

    calibration: bool = True
    residual: bool = True
    p_fits: bool = True


EVERYTHING = Learning()
