"""Which plan to run next, how much is still to be gained (expected gain x P(fits) per GPU-second), and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from autotune.cost.table import Floats
from autotune.search.posterior import Posterior
from autotune.specs import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The next plan's row, the relative gain expected of running it, and what the trial will cost."""

    row: int
    expected_gain: float
    p_fits: float
    gpu_s: float


def choose(posterior: Posterior) -> Choice | None:
    """The row with the largest expected gain per GPU-second; None when nothing is left to run.

    Before anything was measured no gain can be told: then the largest throughput at the expected step time (which
    uncertainty makes longer) x P(fits and does not crash).
    """
    open_rows = np.flatnonzero(~posterior.barred)
    if not len(open_rows):
        return None
    gain = expected_gain(posterior)
    score = (
        gain / posterior.trial_gpu_s if posterior.best is not None else np.exp(posterior.log_mean) * posterior.p_pays
    )
    row = int(open_rows[np.argmax(score[open_rows])])
    return Choice(
        row=row,
        expected_gain=float(gain[row]),
        p_fits=float(posterior.p_fits[row]),
        gpu_s=float(posterior.trial_gpu_s[row]),
    )


def expected_gain(posterior: Posterior) -> Floats:
    """P(pays) * E[max(0, x / best - 1)] for log-normal x (or a mixture of such), a plan; inf without a best."""
    if posterior.best is None:
        return np.full(len(posterior.log_mean), np.inf)
    return np.asarray(sum(weight * gain for weight, gain in _gains(posterior, posterior.best)), dtype=np.float64)


def gain_left(posterior: Posterior) -> float:
    """What is expected to be gained in all by who finds out what holds and then runs the best plan; inf without a best.

    Each supposition has a best plan of its own. One trial of one of them gains little on average where each is hardly
    probable, but together they may be worth a search. At least the largest `expected_gain`, and that where nothing is
    supposed but one thing.
    """
    open_rows = ~posterior.barred
    if posterior.best is None:
        return np.inf
    return float(sum(weight * gain[open_rows].max() for weight, gain in _gains(posterior, posterior.best)))


def _gains(posterior: Posterior, best: float) -> Iterator[tuple[float, Floats]]:
    """(probability, expected gain) under each supposition.

    With z = (mu - ln best) / sigma, E[(x/best - 1)+] = exp(mu - ln best + sigma²/2) * Phi(z + sigma) - Phi(z).
    (The Black-Scholes integral; Jones et al. 1998 have the normal case.)
    """
    for weight, mean, sd in posterior.suppositions or [(1.0, posterior.log_mean, posterior.log_sd)]:
        ahead = mean - np.log(best)
        z = ahead / sd
        gain = np.exp(np.minimum(ahead + 0.5 * sd**2, 50.0)) * ndtr(z + sd) - ndtr(z)
        yield weight, np.maximum(gain, 0.0) * posterior.p_pays


# An estimate that was never tested on this cluster must not end a search on its own word.
MIN_MEASURED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StopVerdict:
    """Whether to stop, the reason, and the relative gain that the best next trial would be expected to bring."""

    stop: bool
    reason: str
    expected_gain: float | None
    gpu_s: float | None


def verdict(posterior: Posterior, budget: Budget, *, trials: int, gpu_s_spent: float) -> StopVerdict:
    """Decides after each trial.

    Args:
        posterior: of all plans.
        budget: the user's limits.
        trials: trials that ended so far.
        gpu_s_spent: GPU-seconds of all trials and probes so far.
    """
    open_rows = np.flatnonzero(~posterior.barred)
    if not len(open_rows):
        return StopVerdict(stop=True, reason="every legal plan was tried", expected_gain=0.0, gpu_s=None)
    gains = expected_gain(posterior)[open_rows]
    best = int(np.argmax(gains))
    gain = float(gains[best]) if posterior.best is not None else None
    cost = float(posterior.trial_gpu_s[open_rows[best]])
    if budget.max_trials is not None and trials >= budget.max_trials:
        return StopVerdict(
            stop=True, reason=f"{trials} trials were run, the most allowed", expected_gain=gain, gpu_s=cost
        )
    if budget.gpu_s is not None and gpu_s_spent + cost > budget.gpu_s:
        spent = f"{gpu_s_spent:.0f} of the {budget.gpu_s:.0f} GPU-seconds that the search may use are spent"
        reason = f"{spent}; another trial needs about {cost:.0f}"
        return StopVerdict(stop=True, reason=reason, expected_gain=gain, gpu_s=cost)
    enough = posterior.measured >= MIN_MEASURED and gain_left(posterior) < budget.min_gain
    if gain is not None and enough:
        reason = f"no plan left is expected to gain {budget.min_gain:.1%} (best {gain:.2%} for {cost:.0f} GPU-seconds)"
        return StopVerdict(stop=True, reason=reason, expected_gain=gain, gpu_s=cost)
    return StopVerdict(stop=False, reason="", expected_gain=gain, gpu_s=cost)
