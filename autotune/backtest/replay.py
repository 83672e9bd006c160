"""Replay: a search over the plans of one group that learns a run's result only by asking for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.backtest.groups import Group
from autotune.backtest.metrics import Forecast, Walk, walk_of
from autotune.backtest.runs import RunStatus
from autotune.cost.calibrate import fit_profile
from autotune.cost.capacity import MAY_FIT
from autotune.cost.framework import FRAMEWORKS, framework_of
from autotune.cost.table import PlanTable
from autotune.search import transfer as transfers
from autotune.search.core import Search
from autotune.search.peaks import SAFE
from autotune.search.posterior import TransferObservation
from autotune.search.residual import EVERYTHING, Learning
from autotune.search.sampler import SamplerName, alternative
from autotune.search.transfer import Shown, alike
from autotune.specs import Plan

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

    The search gets the group's plans, a profile of its collective readings, and transfers if there are any.

    Args:
        group: the runs.
        transfers: what other groups taught.
        learning: the parts of our search that learn.
        told: whether the search is told which framework made the runs, and what was checked on them.
        read: whether it gets the group's collective readings.
    """

    def __init__(
        self,
        group: Group,
        transfers: Sequence[TransferObservation] = (),
        learning: Learning = EVERYTHING,
        *,
        told: bool = True,
        read: bool = True,
    ) -> None:
        self.group, self._transfers, self._learning, self._told = group, transfers, learning, told
        self._table = PlanTable.of(group.plans)
        self._profile = (
            fit_profile(group.cluster, "runs file", group.readings, [], []) if group.readings and read else None
        )
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
            taught: whether the search has the transfers of other groups.
        """
        search = self.search(taught=taught)
        for i in told:
            search.tell(self.group.outcomes[i].plan, self.group.result(i), final=True)
        posterior = search.posterior()
        return Forecast(
            tokens_per_s_per_gpu=np.exp(posterior.log_mean),
            log_sd=posterior.log_sd,
            peak_bytes=posterior.peak_bytes,
            fits=posterior.p_fits >= MAY_FIT,
            safe=posterior.p_fits >= SAFE,
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
            transfers=self._transfers if taught else (),
            framework=framework_of(group.source) if self._told else tuple(FRAMEWORKS.values()),
            learning=self._learning,
        )

    def _ways(self, sampler: SamplerName, seed: int) -> tuple[Ask, Tell]:
        outcomes = self.group.outcomes
        if sampler is SamplerName.PLAN:
            search = self.search(taught=True)
            return search.ask, lambda i: search.tell(outcomes[i].plan, self.group.result(i), final=True)
        other = alternative(sampler, self.group.plans, seed=seed)
        return other.ask, lambda i: other.tell(outcomes[i].plan, outcomes[i].tokens_per_s_per_gpu or None)


# History: what a group may learn from other groups, as transfers on where the estimate was off.


def teachers(group: Group, groups: Sequence[Group], train_gpus: int | None) -> list[Group]:
    """The groups that a group may learn from: others on the same kind of cluster (devices, links, size of a node).

    Args:
        group: the one that is judged.
        groups: all.
        train_gpus: only of the same model and at or under this many GPUs.
    """
    return [
        other
        for other in groups
        if other is not group
        and alike(other.cluster, group.cluster)
        and (train_gpus is None or (other.model.key == group.model.key and other.cluster.devices <= train_gpus))
    ]


def transfers_of(group: Group) -> list[TransferObservation]:
    """A group's outcomes against its own estimates, which know its collective readings only."""
    estimates = Replay(group).search(taught=False).estimates
    shown = [
        Shown(
            tokens_per_s_per_gpu=item.tokens_per_s_per_gpu if item.ok else None,
            peak_bytes=item.reserved_bytes,
            out_of_memory=item.status is RunStatus.OOM,
        )
        for item in group.outcomes
    ]
    return transfers.transfers_of(group.plans, estimates, shown)
