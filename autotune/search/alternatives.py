"""Other ways to choose the next plan, to compare ours with: Optuna's samplers, and orders that learn nothing.

All choose from the same finite set of plans, each at most once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial, TrialState

from autotune.errors import InputError
from autotune.search.sampler import plan_params
from autotune.specs import Plan

DRAWS = {"tpe": 20, "gp": 1}
"""A suggestion that is no plan of the set, or was asked before, costs nothing; the next one is drawn, so often at most.
The Gaussian process suggests the same again until it learns something."""

_DEGREES = ("tp", "pp", "cp", "ep", "vpp", "micro_batch", "zero_stage")
_SWITCHES = ("recompute", "sequence_parallel", "schedule")


class SamplerName(StrEnum):
    """Ways to choose the next plan. `plan` is ours."""

    PLAN = "plan"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    GRID = "grid"
    RULE = "rule"


class Alternative(Protocol):
    """Chooses plans of a finite set, one at a time."""

    def ask(self) -> Plan | None:
        """The next plan, each once; None when all were asked."""

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """The result of the plan asked last; None where it failed."""


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
        return sorted(plans, key=lambda plan: tuple(plan_params(plan).values()))
    return sorted(plans, key=lambda plan: (plan.tp * plan.pp, -plan.micro_batch, plan.zero_stage, plan.tp))


class FixedOrder:
    """Plans in an order that no result changes."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._left = list(reversed(plans))

    def ask(self) -> Plan | None:
        """The next plan."""
        return self._left.pop() if self._left else None

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """Learns nothing."""


class FiniteStudy:
    """One of Optuna's samplers over a finite set of plans that is no product of its parameters.

    The parameters are the fields of a plan in which the set differs, dp excepted (it follows from the others and the
    number of devices): degrees as the index of the value in the set's sorted values, so that the sampler knows their
    order, switches as categories. A suggestion outside the set, or asked before, is failed in the study and drawn
    again; after DRAWS the unasked plan nearest to the last one is taken (steps between indices and unequal
    switches added up). A plan that fails is a failed trial, which Optuna's samplers learn nothing from.

    Args:
        name: tpe or gp.
        plans: the set.
        seed: of the sampler.

    Raises:
        InputError: gp without torch, which Optuna's Gaussian process needs.
    """

    def __init__(self, name: SamplerName, plans: Sequence[Plan], *, seed: int) -> None:
        data = {plan: plan_params(plan) for plan in sorted(plans, key=lambda plan: plan.key)}
        self._values = {field: sorted({row[field] for row in data.values()}) for field in (*_DEGREES, *_SWITCHES)}
        self._fields = [field for field, values in self._values.items() if len(values) > 1]
        self._points = {self._point(row): plan for plan, row in data.items()}
        if len(self._points) < len(plans):
            raise InputError("plans", len(plans), "plans must differ in more than dp")
        self._space = {field: self._distribution(field) for field in self._fields}
        self._draws = DRAWS[name]
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(name, seed))
        self._open: Trial | None = None

    def ask(self) -> Plan | None:
        """The next plan that the sampler suggests."""
        if not self._points:
            return None
        if not self._fields:
            return self._points.popitem()[1]
        for _ in range(self._draws):
            trial = self._study.ask(self._space)
            point = tuple(trial.params[field] for field in self._fields)
            if point in self._points:
                self._open = trial
                return self._points.pop(point)
            self._study.tell(trial, state=TrialState.FAIL)
        nearest = min(self._points, key=lambda other: self._distance(point, other))
        self._study.enqueue_trial(dict(zip(self._fields, nearest, strict=True)))
        self._open = self._study.ask(self._space)
        return self._points.pop(nearest)

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """Ends the open trial."""
        if self._open is None:
            return
        if tokens_per_s_per_gpu is None:
            self._study.tell(self._open, state=TrialState.FAIL)
        else:
            self._study.tell(self._open, tokens_per_s_per_gpu)
        self._open = None

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
