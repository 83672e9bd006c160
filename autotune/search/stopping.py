"""When a search ends, and why, in words for the user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.search.acquisition import expected_gain
from autotune.search.belief import Belief
from autotune.specs import Budget

# An estimate that was never tested on this cluster must not end a search on its own word.
LEAST_TRIALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to stop, the reason, and the relative gain that the best next trial would be expected to bring."""

    stop: bool
    reason: str
    expected_gain: float | None
    gpu_s: float | None


def verdict(belief: Belief, budget: Budget, *, trials: int, gpu_s_spent: float) -> Verdict:
    """Decides after each trial.

    Args:
        belief: of all plans.
        budget: the user's limits.
        trials: trials that ended so far.
        gpu_s_spent: GPU-seconds of all trials and probes so far.
    """
    open_rows = np.flatnonzero(~belief.barred)
    if not len(open_rows):
        return Verdict(stop=True, reason="every legal plan was tried", expected_gain=0.0, gpu_s=None)
    gains = expected_gain(belief)[open_rows]
    best = int(np.argmax(gains))
    gain = float(gains[best]) if belief.best is not None else None
    cost = float(belief.trial_gpu_s[open_rows[best]])
    if budget.max_trials is not None and trials >= budget.max_trials:
        return Verdict(stop=True, reason=f"{trials} trials were run, the most allowed", expected_gain=gain, gpu_s=cost)
    if budget.gpu_s is not None and gpu_s_spent + cost > budget.gpu_s:
        spent = f"{gpu_s_spent:.0f} of the {budget.gpu_s:.0f} GPU-seconds that the search may use are spent"
        reason = f"{spent}; another trial needs about {cost:.0f}"
        return Verdict(stop=True, reason=reason, expected_gain=gain, gpu_s=cost)
    if gain is not None and gain < budget.min_gain and trials >= LEAST_TRIALS:
        reason = f"no plan left is expected to gain {budget.min_gain:.1%} (best {gain:.2%} for {cost:.0f} GPU-seconds)"
        return Verdict(stop=True, reason=reason, expected_gain=gain, gpu_s=cost)
    return Verdict(stop=False, reason="", expected_gain=gain, gpu_s=cost)
