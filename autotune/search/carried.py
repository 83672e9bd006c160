"""What other tunings taught, as the prior of this one: lessons move the parameters, with more doubt than own trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BETWEEN = 0.5
"""Spread of a parameter between two tunings on such clusters, over its prior one: however many lessons there are, this
much doubt stays."""

OUTLIER = 2.5
ROUNDS = 4


def carried_prior(slopes: Floats, residuals: Floats, noise_sd: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """(mean, covariance) of the parameters after the lessons: Bayesian linear regression, wild lessons toned down.

    Args:
        slopes: [lessons, parameters].
        residuals: [lessons] ln(measured / estimated).
        noise_sd: [lessons].
        prior: [parameters, parameters] covariance around zero.
    """
    if not len(residuals):
        return np.zeros(len(prior)), prior
    precision, noise = np.linalg.inv(prior), noise_sd**2
    mean, covariance = np.zeros(len(prior)), np.array(prior)
    for _ in range(ROUNDS):
        weighted = slopes / noise[:, None]
        covariance = np.asarray(np.linalg.inv(precision + weighted.T @ slopes), dtype=np.float64)
        mean = covariance @ (weighted.T @ residuals)
        error = np.abs(residuals - slopes @ mean)
        noise = np.maximum(noise_sd, error / OUTLIER) ** 2
    return mean, covariance + BETWEEN**2 * prior
