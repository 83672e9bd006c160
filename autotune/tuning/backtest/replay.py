"""Replay: a search over the plans of one group that learns a run's result only by asking for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.calibrate import fit_profile
from autotune.cost.framework import framework_of
from autotune.cost.table import PlanTable
from autotune.search.alternatives import SamplerName, alternative
from autotune.search.belief import Lesson
from autotune.search.core import Search
from autotune.search.learning import EVERYTHING, Learning
from autotune.search.peaks import SAFE
from autotune.specs import Plan
from autotune.tuning.backtest.groups import Group
from autotune.tuning.backtest.metrics import Forecast, Walk, walk_of

REACHED = 0.98
"""A replay ends when a plan this good was told: no metric looks further."""

Ask = Callable[[], Plan | None]
Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How one search went, and the group's outcomes in the order in which it asked for them."""

    walk: Walk
    asked: tuple[int, ...]


class Replay:
    """One group, ready to be searched again and again.

    The search gets the group's plans, a profile of its collective readings, and lessons if there are any.

    Args:
        group: the runs.
        lessons: what other groups taught.
        learning: the parts of our search that learn.
    """

    def __init__(self, group: Group, lessons: Sequence[Lesson] = (), learning: Learning = EVERYTHING) -> None:
        self.group, self._lessons, self._learning = group, lessons, learning
        self._table = PlanTable.of(group.plans)
        self._profile = fit_profile(group.cluster, "runs file", group.readings, [], []) if group.readings else None
        self._index = {plan: i for i, plan in enumerate(group.plans)}

    def run(self, sampler: SamplerName, *, seed: int, most: int | None, least: int, tell: bool = True) -> Replayed:
        """Searches until a plan within REACHED of the best was asked for.

        Args:
            sampler: chooses.
            seed: of the sampler; ours and the rule have no chance in them.
            most: trials at most; None for all plans.
            least: trials at least, if there are as many plans.
            tell: whether the sampler learns results; without, it follows its prior.
        """
        most = min(most or len(self._index), len(self._index))
        ask, teach = self._ways(sampler, seed)
        asked: list[int] = []
        best = 0.0
        while len(asked) < most and (best < REACHED * self.group.best or len(asked) < least):
            plan = ask()
            assert plan is not None  # there are as many plans as asks
            i = self._index[plan]
            asked.append(i)
            best = max(best, self.group.outcomes[i].tokens_per_s_per_gpu)
            if tell:
                teach(i)
        return Replayed(walk=walk_of(self.group, asked, most), asked=tuple(asked))

    def forecast(self, told: Sequence[int], *, taught: bool) -> Forecast:
        """What a search believes of each plan after it was told these outcomes.

        Args:
            told: indices of outcomes.
            taught: whether the search has the lessons of other groups.
        """
        search = self.search(taught=taught)
        for i in told:
            search.tell(self.group.outcomes[i].plan, self.group.result(i))
        belief = search.belief()
        return Forecast(
            tokens_per_s_per_gpu=np.exp(belief.log_mean),
            peak_bytes=belief.peak_bytes,
            fits=belief.p_fits >= 0.5,
            safe=belief.p_fits >= SAFE,
            told=np.isin(np.arange(len(self._index)), told),
        )

    def search(self, *, taught: bool) -> Search:
        """A search that was told nothing yet."""
        group = self.group
        return Search(
            group.model,
            group.cluster,
            group.workload,
            plans=self._table,
            profile=self._profile,
            lessons=self._lessons if taught else (),
            framework=framework_of(group.source),
            learning=self._learning,
        )

    def _ways(self, sampler: SamplerName, seed: int) -> tuple[Ask, Tell]:
        outcomes = self.group.outcomes
        if sampler is SamplerName.PLAN:
            search = self.search(taught=True)
            return search.ask, lambda i: search.tell(outcomes[i].plan, self.group.result(i))
        other = alternative(sampler, self.group.plans, seed=seed)
        return other.ask, lambda i: other.tell(outcomes[i].plan, outcomes[i].tokens_per_s_per_gpu or None)
