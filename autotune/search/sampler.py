"""Samplers over the finite set of legal plans: ours (PlanSampler, for Optuna), Optuna's own, and fixed orders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.cost.table import COLUMNS, PlanTable
from autotune.errors import InputError
from autotune.search.core import Search
from autotune.specs import Plan, SamplerName

__all__ = ["Alternative", "FixedOrder", "PlanSampler", "SamplerName", "alternative", "distributions"]


def parameters_of(plan: Plan) -> dict[str, Any]:
    """A plan's fields as an Optuna study keeps them, which has no lists."""
    return plan.to_data() | {"recompute_modules": "+".join(plan.recompute_modules)}


def plan_of(parameters: Mapping[str, Any]) -> Plan:
    """The plan of such fields."""
    modules = [name for name in parameters["recompute_modules"].split("+") if name]
    return Plan.from_data({**parameters, "recompute_modules": modules}, "trial parameters")


def distributions(table: PlanTable) -> dict[str, CategoricalDistribution]:
    """One categorical parameter for each field of a plan, with the values that occur in the table."""
    found = {}
    for name in COLUMNS:
        # One row that has each value tells the value as a plan spells it.
        rows = np.unique(getattr(table, name), return_index=True)[1]
        found[name] = CategoricalDistribution([parameters_of(table.plan(int(row)))[name] for row in rows])
    return found


class PlanSampler(BaseSampler):
    """Asks a `Search` for the whole plan at once, so that only legal plans are ever sampled.

    The search must be told the results too: it learns from them, not from the study.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self.space = distributions(search.table)
        """The parameters and their values."""
        self.chosen: Plan | None = None
        """A plan to give instead of the search's choice."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All fields of a plan, always together."""
        return dict(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next plan; the best one again when every plan was tried."""
        if self.chosen is not None:
            return parameters_of(self.chosen)
        choice = self._search.next()
        if choice is not None:
            return parameters_of(self._search.table.plan(choice.row))
        best = self._search.best
        return parameters_of(best.plan if best else self._search.table.plan(0))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never used: a plan's fields are not independent."""
        raise NotImplementedError(f"{param_name} cannot be sampled apart from the rest of the plan")

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing to do: the search is told by whoever ran the plan."""


DRAWS = {SamplerName.TPE: 20, SamplerName.GP: 1}
"""A suggestion that is no plan of the set, or was asked before, costs nothing; the next one is drawn, so often at most.
The Gaussian process suggests the same again until it learns something."""

_DEGREES = ("tp", "pp", "cp", "ep", "vpp", "micro_batch", "zero_stage")
_SWITCHES = ("recompute", "recompute_modules", "sequence_parallel", "schedule")


class FiniteStudy:
    """One of Optuna's samplers over a finite set of plans that is no product of its parameters.

    The parameters are the fields of a plan in which the set differs, dp excepted (it follows from the others and the
    number of devices): degrees as the index of the value in the set's sorted values, so that the sampler knows their
    order, switches as categories. A suggestion outside the set, or asked before, is failed in the study and drawn
    again; after DRAWS the unasked plan nearest to the last one is taken (steps between indices and unequal
    switches added up). A plan that fails is a failed trial, which Optuna's samplers learn nothing from.
    Each plan is drawn from a seed of its own, so that a study that was made again and told the same plans in the same
    order asks what the first one would have asked.

    Args:
        name: tpe or gp.
        plans: the set.
        seed: of the sampler.

    Raises:
        InputError: gp without torch, which Optuna's Gaussian process needs.
    """

    def __init__(self, name: SamplerName, plans: Sequence[Plan], *, seed: int) -> None:
        data = {plan: parameters_of(plan) for plan in sorted(plans, key=lambda plan: plan.key)}
        self._values = {field: sorted({row[field] for row in data.values()}) for field in (*_DEGREES, *_SWITCHES)}
        self._fields = [field for field, values in self._values.items() if len(values) > 1]
        self._point_of = {plan: self._point(row) for plan, row in data.items()}
        self._points = {point: plan for plan, point in self._point_of.items()}
        """The plans that were not asked yet."""
        if len(self._points) < len(plans):
            raise InputError("plans", len(plans), "plans must differ in more than dp")
        self._space = {field: self._distribution(field) for field in self._fields}
        self._name, self._seed = name, seed
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(name, seed))
        self._open: dict[Plan, Trial] = {}

    def ask(self) -> Plan | None:
        """The next plan that the sampler suggests."""
        if not self._points:
            return None
        if not self._fields:
            return self._take(())
        left = len(self._points)
        self._study.sampler = _sampler(self._name, int(np.random.SeedSequence((self._seed, left)).generate_state(1)[0]))
        for _ in range(DRAWS[self._name]):
            trial = self._study.ask(self._space)
            point = tuple(trial.params[field] for field in self._fields)
            if point in self._points:
                self._open[self._points[point]] = trial
                return self._points.pop(point)
            self._study.tell(trial, state=TrialState.FAIL)
        return self._take(min(self._points, key=lambda other: self._distance(point, other)))

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """Ends the plan's trial; one that was not asked here counts as asked. A repeat or an outsider is ignored."""
        state = TrialState.FAIL if tokens_per_s_per_gpu is None else TrialState.COMPLETE
        trial, point = self._open.pop(plan, None), self._point_of.get(plan)
        if trial is not None:
            self._study.tell(trial, tokens_per_s_per_gpu, state=state)
        elif point is not None and point in self._points:
            del self._points[point]
            params = dict(zip(self._fields, point, strict=True))
            self._study.add_trial(
                create_trial(state=state, value=tokens_per_s_per_gpu, params=params, distributions=self._space)
            )

    def expect(self, plan: Plan) -> None:
        """Asks the study for a plan that was not asked here; one that was, or an outsider, is ignored."""
        point = self._point_of.get(plan)
        if point is not None and point in self._points:
            self._take(point)

    def _take(self, point: tuple[Any, ...]) -> Plan:
        """Asks the study for this very point, if it has anything to choose."""
        if not self._fields:
            return self._points.pop(point)
        self._study.enqueue_trial(dict(zip(self._fields, point, strict=True)))
        plan = self._points.pop(point)
        self._open[plan] = self._study.ask(self._space)
        return plan

    def _point(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            self._values[field].index(row[field]) if field in _DEGREES else row[field] for field in self._fields
        )

    def _distribution(self, field: str) -> BaseDistribution:
        values = self._values[field]
        return IntDistribution(0, len(values) - 1) if field in _DEGREES else CategoricalDistribution(values)

    def _distance(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
        steps = [
            abs(a - b) if field in _DEGREES else float(a != b)
            for field, a, b in zip(self._fields, one, other, strict=True)
        ]
        return float(np.sum(steps))


def _sampler(name: SamplerName, seed: int) -> BaseSampler:
    if name is SamplerName.TPE:
        return TPESampler(seed=seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return GPSampler(seed=seed, deterministic_objective=True)
    except ImportError:
        raise InputError("--sampler", name.value, "needs torch, which Optuna's Gaussian process is built on") from None


class Alternative(Protocol):
    """Another way to choose among the same finite set of plans, each at most once, to compare ours with."""

    def ask(self) -> Plan | None:
        """The next plan, each once; None when all were asked."""

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """The result of a plan, None where it failed.

        A plan of the set that was not asked here (of a tuning that goes on in another process) counts as asked.
        """

    def expect(self, plan: Plan) -> None:
        """Counts a plan as asked that is in flight since before this process."""


def alternative(name: SamplerName, plans: Sequence[Plan], *, seed: int) -> Alternative:
    """The sampler of that name over these plans. Raises InputError for `plan`, which is no alternative to itself."""
    if name is SamplerName.PLAN:
        raise InputError("sampler", name.value, "an alternative to our own sampler is needed")
    if name in {SamplerName.TPE, SamplerName.GP}:
        return FiniteStudy(name, plans, seed=seed)
    return FixedOrder(_ordered(name, sorted(plans, key=lambda plan: plan.key), seed))


def _ordered(name: SamplerName, plans: list[Plan], seed: int) -> list[Plan]:
    """The orders that learn nothing.

    random: uniform, which is what Optuna's RandomSampler comes to where suggestions outside the set cost nothing.
    grid: nested loops over the fields in their order, as sweep scripts have them.
    rule: smallest tp*pp, then largest micro-batch; what that leaves equal by ZeRO stage and tp.
    """
    if name is SamplerName.RANDOM:
        return [plans[i] for i in np.random.default_rng(seed).permutation(len(plans))]
    if name is SamplerName.GRID:
        return sorted(plans, key=lambda plan: tuple(plan.to_data().values()))
    return sorted(plans, key=lambda plan: (plan.tp * plan.pp, -plan.micro_batch, plan.zero_stage, plan.tp))


class FixedOrder:
    """Plans in an order that no result changes."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._left: dict[Plan | None, None] = dict.fromkeys(plans)

    def ask(self) -> Plan | None:
        """The next plan."""
        plan = next(iter(self._left), None)
        self._left.pop(plan, None)
        return plan

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """Learns nothing but not to ask it."""
        self._left.pop(plan, None)

    def expect(self, plan: Plan) -> None:
        """Does not ask it."""
        self._left.pop(plan, None)
