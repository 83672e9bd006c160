"""Search: ask for the next plan, tell what it did. Needs no database, no torch and no service.

search = Search(model, cluster, workload, profile=profile)
while not search.verdict(budget).stop:
    plan = search.ask()
    search.tell(plan, measure(plan))     # a Measurement, a StepReading, or a Failure
print(search.best)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.cost.estimate import NINETY_PERCENT, EstimateTable, estimate_table
from autotune.cost.framework import Framework
from autotune.cost.table import PlanTable
from autotune.errors import InputError
from autotune.search.acquisition import Choice, StopVerdict, choose, verdict
from autotune.search.physics import Assumed, network_factors, with_network
from autotune.search.posterior import Observation, Posterior, TransferObservation, believe
from autotune.search.ranking import RankedPlan, observation, ranking
from autotune.search.residual import EVERYTHING, Learning, features
from autotune.search.space import PIECE_ROWS, Runtime, legal_plans
from autotune.specs import (
    Budget,
    ClusterSpec,
    Estimate,
    Failure,
    FailureKind,
    ModelSpec,
    Plan,
    Profile,
    StepReading,
    StepRequest,
    Trial,
    Workload,
)

# Measurement: what callers who run plans in their own framework report of one run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured run of a plan.

    Args:
        tokens_per_s_per_gpu: global batch * sequence length / (seconds a step * devices).
        relative_noise: half width of its 95 % interval over the mean.
        peak_bytes: the most that the allocator reserved on any rank; None if unknown, which teaches nothing of memory.
        setup_s: seconds from the start to the first step; None if unknown.

    Raises:
        InputError: a figure that no run can have.
    """

    tokens_per_s_per_gpu: float
    relative_noise: float = 0.0
    peak_bytes: float | None = None
    setup_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens_per_s_per_gpu) and self.tokens_per_s_per_gpu > 0):
            raise InputError("tokens_per_s_per_gpu", self.tokens_per_s_per_gpu, "must be finite and above 0")
        for name in ("relative_noise", "peak_bytes", "setup_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(name, value, "must be finite and at least 0")


# The finite set that the sampler weighs one by one; a larger legal space is cut to the best estimates that may fit.
MAX_CANDIDATES = 100_000
FIRST_SETUP_S = 1.0
TRIAL_STEPS = sum(StepRequest.model_fields[name].default for name in ("warmup_steps", "min_steps")) + 2
"""Steps of a trial: untimed, timed, and two more until the interval is narrow or for the trace."""

MAY_BE_CHANCE = frozenset({FailureKind.CRASH, FailureKind.HANG, FailureKind.COMMUNICATION})
NOT_THE_PLANS_FAULT = frozenset({FailureKind.LOST, FailureKind.CANCELLED, FailureKind.UNAVAILABLE})


class Search:
    """The choice of trials for one model, cluster and workload.

    Args:
        model: what is trained.
        cluster: on what.
        workload: how.
        plans: the plans to choose from; by default the whole legal space of the runtime.
        profile: the cluster's calibration; without one the catalog's figures stand in, if it has any.
        history: earlier trials of the same model, cluster and workload, to learn from.
        transfers: what tunings of other models, sizes or workloads on such a cluster showed of the estimate's errors.
        runtime: whose legality rules hold.
        framework: whose habits the estimates assume; the workload's by default. Several, where nobody said which of
            them runs the plans: each counts by how probable it makes what was measured.
        learning: the parts that learn; all of them but for comparison.

    Raises:
        InputError: no legal plan.
        MissingMeasurementError: neither a profile nor catalog figures.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        workload: Workload,
        *,
        plans: Sequence[Plan] | PlanTable | None = None,
        profile: Profile | None = None,
        history: Sequence[Trial] = (),
        transfers: Sequence[TransferObservation] = (),
        runtime: Runtime = Runtime.TORCH,
        framework: Framework | Sequence[Framework] | None = None,
        learning: Learning = EVERYTHING,
    ) -> None:
        self._frameworks = tuple(framework) if isinstance(framework, Sequence) else (framework,)
        self._learning = learning
        self.model, self.cluster, self.workload = model, cluster, workload
        table = plans if isinstance(plans, PlanTable) else PlanTable.of(plans) if plans is not None else None
        if table is None:
            table = legal_plans(model, cluster, workload, runtime=runtime)
        if not len(table):
            raise InputError("plans", 0, "at least one legal plan is needed")
        self.legal = len(table)
        self.table, self._assumed = self._most_promising(table, profile)
        self.estimates = self._assumed[0].estimates
        self._points = features(self.table)
        self._transfers = tuple(transfers)
        self._asked: list[Plan] = []
        self._told: list[Observation] = []
        self._setups: list[float] = []
        self._believed: tuple[tuple[int, tuple[Plan, ...], int], Posterior] | None = None
        for trial in history:
            if trial.reading is not None and not trial.reading.pruned:
                self._told.append(observation(trial.plan, trial.reading, cluster))
            elif trial.failure is not None and trial.failure.kind is FailureKind.OOM:
                self._told.append(Observation(plan=trial.plan, out_of_memory=True))
        self._history = len(self._told)

    def _most_promising(self, table: PlanTable, profile: Profile | None) -> tuple[PlanTable, list[Assumed]]:
        most = MAX_CANDIDATES // len(self._frameworks)
        if len(table) > most:
            worth = np.zeros(len(table))  # by the framework that makes most of a plan, over its own best plan
            for framework in self._frameworks:
                found = np.empty(len(table))
                for start in range(0, len(table), PIECE_ROWS):  # the estimates of all would fill the memory
                    piece = slice(start, start + PIECE_ROWS)
                    made = self._estimates(table.take(piece), profile, framework)
                    found[piece] = made.tokens_per_s_per_gpu * np.maximum(made.p_fits, 0.1)
                worth = np.maximum(worth, found / found.max())
            table = table.take(np.argsort(-worth, kind="stable")[:most])
        return table, [item for framework in self._frameworks for item in self._networks(table, profile, framework)]

    def _networks(self, table: PlanTable, profile: Profile | None, framework: Framework | None) -> Iterator[Assumed]:
        first = self._estimates(table, profile, framework)
        for slower, probability in network_factors(first.framework).items():
            made = first if slower == 1.0 else self._estimates(table, profile, framework, slower)
            yield Assumed(made, probability, slower)

    def _estimates(
        self, table: PlanTable, profile: Profile | None, framework: Framework | None, slower: float = 1.0
    ) -> EstimateTable:
        cluster, profile = with_network(self.cluster, profile, slower)
        return estimate_table(self.model, cluster, self.workload, table, profile, framework)

    @property
    def observations(self) -> Sequence[Observation]:
        """What was told, in order; history first."""
        return tuple(self._told)

    @property
    def trials(self) -> int:
        """Trials told, without history."""
        return len(self._told) - self._history

    def posterior(self) -> Posterior:
        """What is expected of each plan of `table` now. Plans in flight count as barred."""
        state = (len(self._told), tuple(self._asked), len(self._setups))
        if self._believed is None or self._believed[0] != state:
            self._believed = (state, self._believe([Observation(plan=plan) for plan in self._asked]))
        return self._believed[1]

    def _believe(self, flying: Sequence[Observation]) -> Posterior:
        return believe(
            self.table,
            self._points,
            self._assumed,
            [*self._told, *flying],
            transfers=self._transfers,
            devices=self.cluster.devices,
            setup_s=float(np.median(self._setups)) if self._setups else FIRST_SETUP_S,
            learning=self._learning,
            steps=TRIAL_STEPS,
        )

    def next(self) -> Choice | None:
        """What `ask` would choose, without asking.

        Plans in flight are taken to measure what is believed of them, so that the next trial is not spent beside
        them (the "kriging believer" among the constant liars: Ginsbourger, Le Riche and Carraro 2010). A lie counts
        as the best plan here, never in `posterior`. Before anything was measured the next best expectation is next.
        """
        posterior = self.posterior()
        if posterior.best is None:
            return choose(posterior)
        lies = [
            Observation(plan=plan, tokens_per_s_per_gpu=float(np.exp(posterior.log_mean[row])))
            for plan in self._asked
            if (row := self.table.find(plan)) is not None
        ]
        return choose(self._believe(lies) if lies else posterior)

    def ask(self) -> Plan | None:
        """The plan to run next; None when every plan was run. Each plan is asked once."""
        choice = self.next()
        if choice is None:
            return None
        plan = self.table.plan(choice.row)
        self._asked.append(plan)
        return plan

    def expect(self, plan: Plan) -> None:
        """Notes a plan in flight that somebody else chose (enqueued, or of a resumed tuning)."""
        self._asked.append(plan)

    def tell(
        self,
        plan: Plan,
        result: StepReading | Measurement | Failure,
        *,
        gpu_s: float | None = None,
        final: bool = False,
    ) -> None:
        """Learns a result. Only an OOM teaches memory; a failure that is not the plan's own leaves it open.

        One that may be chance (a crash, a hang) makes the plan less probable to run, and those that are like it.

        Unless it is `final`: the plan was tried often enough, and is not asked again.
        """
        if plan in self._asked:
            self._asked.remove(plan)
        if isinstance(result, Failure):
            if final or result.kind not in NOT_THE_PLANS_FAULT:
                oom = result.kind is FailureKind.OOM
                crashed = result.kind in MAY_BE_CHANCE
                self._told.append(
                    Observation(plan=plan, out_of_memory=oom, crashed=crashed, final=final or not crashed, gpu_s=gpu_s)
                )
            return
        if result.setup_s is not None:
            self._setups.append(result.setup_s)
        if isinstance(result, Measurement):
            self._told.append(
                Observation(
                    plan=plan,
                    tokens_per_s_per_gpu=result.tokens_per_s_per_gpu,
                    relative_noise=result.relative_noise,
                    peak_bytes=result.peak_bytes,
                    final=final,
                    gpu_s=gpu_s,
                )
            )
            return
        self._told.append(replace(observation(plan, result, self.cluster, gpu_s), final=final))

    def verdict(self, budget: Budget, *, gpu_s_spent: float = 0.0) -> StopVerdict:
        """Whether to go on, and the expected gain of doing so. Plans in flight count as run, at their expected cost."""
        posterior = self.posterior()
        flying = [row for plan in self._asked if (row := self.table.find(plan)) is not None]
        spent = gpu_s_spent + float(posterior.trial_gpu_s[flying].sum())
        return verdict(posterior, budget, trials=self.trials + len(self._asked), gpu_s_spent=spent)

    def estimate_of(self, plan: Plan) -> Estimate | None:
        """The estimate of a plan of the table; None for a plan outside it.

        The parts are the uncorrected estimate's; the interval of the step time and P(fits) are what is believed now.
        """
        row = self.table.find(plan)
        if row is None:
            return None
        posterior = self.posterior()
        middle = self.workload.tokens_per_step / self.cluster.devices / float(np.exp(posterior.log_mean[row]))
        spread = float(np.exp(NINETY_PERCENT * posterior.log_sd[row]))
        return self.estimates.row(row).model_copy(
            update={
                "step_time_interval_s": (middle / spread, middle * spread),
                "p_fits": float(posterior.p_fits[row]),
            }
        )

    def ranking(self) -> list[RankedPlan]:
        """All fully measured plans, fastest first; repeats of a plan are pooled."""
        return ranking(self._told)

    @property
    def best(self) -> RankedPlan | None:
        """The fastest measured plan."""
        ranking = self.ranking()
        return ranking[0] if ranking else None
