"""How probably a plan crashes: chance, the plan itself, or something that all plans with a feature share.

Bayes' rule over hypotheses: crashes come by chance; or besides, every plan with one feature (a pipeline, ZeRO-3, ...)
crashes nearly always. A plan may also be broken on its own. So one crash leaves a plan worth another try once little
else is to be gained, several of one feature's plans and of no others condemn the feature, and a success of one of its
plans acquits it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.cost.table import Floats, PlanTable

CHANCE = 0.1
"""How often a run crashes for nothing that the plan has to do with (assumed)."""

BROKEN = 0.2
"""How probably a plan that crashed for the first time is itself broken, before that crash (assumed)."""

FEATURE_BROKEN = 0.15
"""How probably some feature is broken, before anything ran; shared among all of them (assumed)."""

ALWAYS = 0.97
"""How often a broken plan crashes."""

MOST_CRASHES = 2
"""A plan that crashed so often and never ran is not tried again."""


def crash_features(table: PlanTable) -> NDArray[np.bool_]:
    """What may be broken as such: whether a plan has it, [n, features]."""
    degrees = (table.tp, table.pp, table.cp, table.ep, table.vpp)
    columns = [column > 1 for column in degrees]
    columns += [table.zero_stage == stage for stage in (1, 2, 3)]
    columns += [table.recompute == code for code in np.unique(table.recompute) if code]
    columns += [table.schedule == code for code in np.unique(table.schedule)]
    columns.append(np.asarray(table.sequence_parallel, dtype=np.bool_))
    return np.stack(columns, axis=1)


def p_runs(table: PlanTable, crashed: Sequence[int], ran: Sequence[int]) -> Floats:
    """The probability that a run of each plan does not crash, [n].

    Args:
        table: n plans.
        crashed: rows of the runs that crashed.
        ran: rows of those that did not, out of memory included: they were started.
    """
    if not crashed:
        return np.ones(len(table))
    has = crash_features(table)
    failed, well = has[list(crashed)].sum(axis=0), has[list(ran)].sum(axis=0) if ran else np.zeros(has.shape[1])
    # A hypothesis explains the runs of its feature; those of all others are chance under each of them.
    log_odds = failed * np.log(ALWAYS / CHANCE) + well * np.log((1.0 - ALWAYS) / (1.0 - CHANCE))
    weights = np.append(FEATURE_BROKEN / has.shape[1] * np.exp(np.minimum(log_odds, 500.0)), 1.0 - FEATURE_BROKEN)
    weights /= weights.sum()
    broken = has @ weights[:-1]
    crashes = np.bincount(np.asarray(crashed, dtype=np.intp), minlength=len(table))
    own = BROKEN * (ALWAYS / CHANCE) ** crashes
    own = np.where(crashes > 0, own / (own + 1.0 - BROKEN), 0.0)
    own[np.asarray(ran, dtype=np.intp)] = 0.0
    return np.asarray((1.0 - np.maximum(broken, own) * ALWAYS) * np.where(own > 0, 1.0 - CHANCE, 1.0))
