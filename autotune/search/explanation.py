"""Explanation: limits, losses and what-ifs of one plan among all legal ones, by estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import PlanTable
from autotune.search.explain import Loss, estimated_step, loss, losses, misfit
from autotune.search.limits import Limit, estimated_limits, memory_limit
from autotune.search.whatif import Setting, WhatIf, what_ifs
from autotune.specs import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Limits, largest first; losses, measured ones first; what-ifs, most helpful first. Each says what it rests on."""

    limits: Sequence[Limit]
    losses: Sequence[Loss]
    what_ifs: Sequence[WhatIf]

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "limits": [item.to_data() for item in self.limits],
            "losses": [item.to_data() for item in self.losses],
            "what_ifs": [item.to_data() for item in self.what_ifs],
        }


def explain_setting(setting: Setting, table: PlanTable, estimates: EstimateTable, plan: Plan) -> Explanation:
    """By estimates alone: of one plan of a table."""
    row = table.find(plan)
    assert row is not None, "the plan is one of the table"
    memory = memory_limit(table, estimates)
    return Explanation(
        limits=[*estimated_limits(estimates.row(row)), *([memory] if memory else [])],
        losses=losses(plan, table, estimates),
        what_ifs=what_ifs(setting, table, estimates),
    )


def rejection(plan: Plan, table: PlanTable, estimates: EstimateTable) -> Loss | None:
    """Why a plan of the table is not the one to use, by estimate; None if it is, or if none fits to compare with."""
    row = table.find(plan)
    assert row is not None, "the plan is one of the table"
    if not estimates.fits.any():
        return None
    best = int(np.argmin(np.where(estimates.fits, estimates.step_time_s, np.inf)))
    if best == row:
        return None
    steps = [estimated_step(estimates.row(i)) for i in (best, row)]
    return loss(table.plan(best), steps[0], plan, steps[1], misfit(estimates, row))
