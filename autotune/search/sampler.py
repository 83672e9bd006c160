"""PlanSampler: our choice of the next plan as an Optuna sampler over the finite set of legal plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.cost.table import COLUMNS, PlanTable
from autotune.search.core import Search
from autotune.specs import Plan


def plan_params(plan: Plan) -> dict[str, Any]:
    """A plan as Optuna parameters: plain numbers, booleans and strings."""
    return plan.to_data()


def plan_of(params: dict[str, Any]) -> Plan:
    """The plan of Optuna parameters."""
    return Plan.from_data(params, "trial parameters")


def distributions(table: PlanTable) -> dict[str, CategoricalDistribution]:
    """One categorical parameter for each field of a plan, with the values that occur in the table."""
    found = {}
    for name in COLUMNS:
        # One row that has each value tells the value as a plan spells it.
        rows = np.unique(getattr(table, name), return_index=True)[1]
        found[name] = CategoricalDistribution([plan_params(table.plan(int(row)))[name] for row in rows])
    return found


class PlanSampler(BaseSampler):
    """Asks a `Search` for the whole plan at once, so that only legal plans are ever sampled.

    The search must be told the results too (the study keeps them; the search learns from them).
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._space = distributions(search.table)
        self.chosen: Plan | None = None
        """A plan to give instead of the search's choice."""

    @property
    def space(self) -> dict[str, CategoricalDistribution]:
        """The parameters and their values."""
        return self._space

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All fields of a plan, always together."""
        return dict(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next plan; the best one again when every plan was tried (Optuna asks for enqueued trials too)."""
        if self.chosen is not None:
            return plan_params(self.chosen)
        choice = self._search.next()
        if choice is not None:
            return plan_params(self._search.table.plan(choice.row))
        best = self._search.best
        return plan_params(best.plan if best else self._search.table.plan(0))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never used: a plan's fields are not independent."""
        raise NotImplementedError(f"{param_name} cannot be sampled apart from the rest of the plan")

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing to do: `search.study` stores the memory constraint."""
