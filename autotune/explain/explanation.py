"""Explanation: limits, losses and what-ifs of one plan among all legal ones, by estimate; and of a tuning, where its
own measurements count first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import PlanTable
from autotune.errors import MissingMeasurementError
from autotune.explain.limits import Limit, LimitKind, estimated_limits, measured_limits, memory_limit
from autotune.explain.losses import Loss, StepParts, changed, estimated_step, loss, losses, measured_step, misfit, risk
from autotune.explain.whatif import Setting, WhatIf, what_ifs
from autotune.search.ranking import Best, RankedPlan
from autotune.search.space import runtime_of
from autotune.specs import Plan, Profile, Tuning

MAX_RIVALS = 3
MAX_LINES = 8


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


def explained(setting: Setting, plan: Plan, *, asked: bool) -> dict[str, Any]:
    """For --json: the explanation of a plan by estimate; of one that was `asked` for also why it is not the best one.

    The first of a ranking may be the simplest of several that the estimate cannot tell apart: nothing is against it.
    """
    table = setting.plans()
    if table.find(plan) is None:  # outside the space that the setting leaves
        table = PlanTable.concat([table, PlanTable.of([plan])])
    estimates = setting.estimates(table)
    refused = rejection(plan, table, estimates) if asked else None
    return {
        "explanation": explain_setting(setting, table, estimates, plan).to_data(),
        "rejection": refused.to_data() if refused else None,
    }


def rejection(plan: Plan, table: PlanTable, estimates: EstimateTable) -> Loss | None:
    """Why a plan of the table is not the one to use, by estimate; None if it is, or if none fits to compare with."""
    row = table.find(plan)
    assert row is not None, "the plan is one of the table"
    best = estimates.best_row
    if best is None or best == row:
        return None
    steps = [estimated_step(estimates.row(i)) for i in (best, row)]
    return loss(table.plan(best), steps[0], plan, steps[1], misfit(estimates, row) or risk(estimates, best, row))


def explain_best(best: Best, tuning: Tuning, profile: Profile | None) -> Explanation:
    """Of a tuning: what was measured, and the estimates beside it; without estimates where the cluster has neither
    profile nor catalog figures.
    """

    def step(ranked: RankedPlan) -> StepParts:
        traces = [trial.reading for trial in best.all_trials if trial.plan == ranked.plan and trial.reading]
        seconds = tuning.workload.tokens_per_step / (ranked.tokens_per_s_per_gpu * tuning.cluster.devices)
        return measured_step(traces, seconds)

    plan, own = best.ranked.plan, step(best.ranked)
    measured = [loss(plan, own, rival.plan, step(rival)) for rival in _rivals(plan, best.runners_up)]
    readings = [trial.reading for trial in best.trials if trial.reading is not None]
    setting = Setting(
        model=tuning.model,
        cluster=tuning.cluster,
        workload=tuning.workload,
        profile=profile,
        space=tuning.space,
        runtime=runtime_of(tuning.workload),
    )
    table = setting.plans()
    try:
        estimates = setting.estimates(table)
    except MissingMeasurementError:
        return Explanation(limits=measured_limits(readings, None), losses=measured, what_ifs=())
    row = table.find(plan)
    if row is None or not estimates.fits.any():
        return Explanation(limits=measured_limits(readings, None), losses=measured, what_ifs=())
    estimated = explain_setting(setting, table, estimates, plan)
    shown = {item.change for item in measured}
    memory = [item for item in estimated.limits if item.kind is LimitKind.MEMORY]
    traced = measured_limits(readings, estimates.row(row))
    return Explanation(
        limits=[*traced, *memory] if traced else estimated.limits,
        losses=[*measured, *(item for item in estimated.losses if item.change not in shown)][:MAX_LINES],
        what_ifs=estimated.what_ifs,
    )


def _rivals(plan: Plan, runners_up: Sequence[RankedPlan]) -> list[RankedPlan]:
    """The measured plans that tell most: the fastest of each other (tp, pp, cp), three at most, and of each single
    other change."""
    degrees, single, found = {(plan.tp, plan.pp, plan.cp)}, set(), []
    for rival in runners_up:
        dimensions = changed(plan, rival.plan)
        other = (rival.plan.tp, rival.plan.pp, rival.plan.cp)
        alone = dimensions[0] if len(dimensions) == 1 else None
        if (other not in degrees and len(degrees) <= MAX_RIVALS) or (alone and alone not in single):
            found.append(rival)
        degrees.add(other)
        single.add(alone)
    return found
