"""Which plan to run next, and how much is still to be gained: expected gain x P(fits) per GPU-second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.search.belief import Belief

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The next plan's row, the relative gain expected of running it, and what the trial will cost."""

    row: int
    expected_gain: float
    p_fits: float
    gpu_s: float


def choose(belief: Belief) -> Choice | None:
    """The row with the largest expected gain per GPU-second; None when nothing is left to run.

    Before anything was measured no gain can be told: then the largest throughput at the expected step time (which
    uncertainty makes longer) x P(fits).
    """
    open_rows = np.flatnonzero(~belief.barred)
    if not len(open_rows):
        return None
    gain = expected_gain(belief)
    score = gain / belief.trial_gpu_s if belief.best is not None else np.exp(belief.log_mean) * belief.p_fits
    row = int(open_rows[np.argmax(score[open_rows])])
    return Choice(
        row=row,
        expected_gain=float(gain[row]),
        p_fits=float(belief.p_fits[row]),
        gpu_s=float(belief.trial_gpu_s[row]),
    )


def expected_gain(belief: Belief) -> Floats:
    """P(fits) * E[max(0, x / best - 1)] for log-normal x, a plan; inf while there is no best.

    With z = (mu - ln best) / sigma, E[(x/best - 1)+] = exp(mu - ln best + sigma²/2) * Phi(z + sigma) - Phi(z).
    (The Black-Scholes integral; Jones et al. 1998 have the normal case.)
    """
    if belief.best is None:
        return np.full(len(belief.log_mean), np.inf)
    ahead = belief.log_mean - np.log(belief.best)
    sd = belief.log_sd
    z = ahead / sd
    gain = np.exp(np.minimum(ahead + 0.5 * sd**2, 50.0)) * ndtr(z + sd) - ndtr(z)
    return np.asarray(np.maximum(gain, 0.0) * belief.p_fits, dtype=np.float64)
