"""Retuning: when a challenger may now win, and what a tuning may cost then. Pure."""

from __future__ import annotations

from autotune.specs import BestEntry, Budget
from autotune.specs.regression import Check

LEAST_TRIALS = 4
"""A budget for fewer trials than this finds nothing: it is not begun."""

TRIALS_WITHOUT_BUDGET = 12
START_S, TRIAL_S, STEPS = 10.0, 3.0, 14
"""Assumed of a trial: seconds until ranks are ready, seconds beside its steps, and steps."""


def retune_budget(check: Check, entry: BestEntry, left_gpu_s: float | None) -> Budget | None:
    """The budget of the tuning that follows from a check; None if none does, or too little is left.

    Args:
        check: ended.
        entry: that was checked.
        left_gpu_s: GPU-seconds that are left of the night's; None is no limit.
    """
    if check.result is None or not check.result.retune_reason or check.tuning_id is not None:
        return None
    if left_gpu_s is None:
        return Budget(max_trials=TRIALS_WITHOUT_BUDGET)
    step_s = entry.workload.tokens_per_step / (entry.tokens_per_s_per_gpu * entry.cluster.devices)
    needed = entry.cluster.devices * (START_S + LEAST_TRIALS * (TRIAL_S + STEPS * step_s))
    return Budget(gpu_s=left_gpu_s) if left_gpu_s >= needed else None
