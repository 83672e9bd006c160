"""Optuna's own samplers over a finite set of plans."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial, TrialState

from autotune.errors import InputError
from autotune.specs import Plan, SamplerName

DRAWS = {SamplerName.TPE: 20, SamplerName.GP: 1}
"""A suggestion that is no plan of the set, or was asked before, costs nothing; the next one is drawn, so often at most.
The Gaussian process suggests the same again until it learns something."""

_DEGREES = ("tp", "pp", "cp", "ep", "vpp", "micro_batch", "zero_stage")
_SWITCHES = ("recompute", "sequence_parallel", "schedule")


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
        data = {plan: plan.to_data() for plan in sorted(plans, key=lambda plan: plan.key)}
        self._values = {field: sorted({row[field] for row in data.values()}) for field in (*_DEGREES, *_SWITCHES)}
        self._fields = [field for field, values in self._values.items() if len(values) > 1]
        self._points = {self._point(row): plan for plan, row in data.items()}
        if len(self._points) < len(plans):
            raise InputError("plans", len(plans), "plans must differ in more than dp")
        self._space = {field: self._distribution(field) for field in self._fields}
        self._draws = DRAWS[name]
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(name, seed))
        self._open: dict[Plan, Trial] = {}

    def ask(self) -> Plan | None:
        """The next plan that the sampler suggests."""
        if not self._points:
            return None
        if not self._fields:
            return self._take(())
        for _ in range(self._draws):
            trial = self._study.ask(self._space)
            point = tuple(trial.params[field] for field in self._fields)
            if point in self._points:
                self._open[self._points[point]] = trial
                return self._points.pop(point)
            self._study.tell(trial, state=TrialState.FAIL)
        return self._take(min(self._points, key=lambda other: self._distance(point, other)))

    def tell(self, plan: Plan, tokens_per_s_per_gpu: float | None) -> None:
        """Ends the plan's trial; one that was not asked here is asked first. A repeat or an outsider is ignored."""
        self.expect(plan)
        trial = self._open.pop(plan, None)
        if trial is None:
            return
        if tokens_per_s_per_gpu is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, tokens_per_s_per_gpu)

    def expect(self, plan: Plan) -> None:
        """Asks the study for a plan that was not asked here; one that was, or an outsider, is ignored."""
        point = next((point for point, other in self._points.items() if other == plan), None)
        if point is not None:
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
