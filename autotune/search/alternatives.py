"""Other ways to choose the next plan, to compare ours with: Optuna's samplers, and orders that learn nothing.

All choose from the same finite set of plans, each at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autotune.errors import InputError
from autotune.specs import Plan, SamplerName

__all__ = ["Alternative", "FixedOrder", "SamplerName", "alternative"]


class Alternative(Protocol):
    """Chooses plans of a finite set, one at a time."""

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
        from autotune.search.finite_study import FiniteStudy  # Optuna is loaded where it is used

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
