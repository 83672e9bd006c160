"""Planner: all that a tuning's steps follow from, rebuilt from the store at any time. It runs nothing itself.

A machine on its own (fleet.local) and a fleet (fleet.service) take the same steps from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autotune.cost.calibrate import fit_profile
from autotune.imports.learning import fastest_plans, same_request, transfers_from, with_links
from autotune.knowledge.answer import earlier_transfers
from autotune.knowledge.recording import remember
from autotune.ports.store import KnowledgeStore
from autotune.search.acquisition import StopVerdict
from autotune.search.core import NOT_THE_PLANS_FAULT, Search
from autotune.search.posterior import TransferObservation
from autotune.search.profiling import missing_probes, needed_probes
from autotune.search.ranking import RankedPlan
from autotune.search.sampler import Alternative, alternative
from autotune.search.space import is_probed, legal_plans, runtime_of
from autotune.search.study import Asked, PlanStudy
from autotune.search.transfer import merged
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    DeviceKind,
    Estimate,
    FailureKind,
    LayerRequest,
    Plan,
    ProbeRequest,
    Profile,
    SamplerName,
    StepRequest,
    Trial,
    TrialState,
    Tuning,
    TuningState,
)
from autotune.specs.imported import ImportedRun
from autotune.tuning.lifecycle import MAX_FAILED_ALIKE, Facts, search_budget

PROBE_DEADLINE_S = 120.0
# A trial is given up as pruned when its steps are slower than the best plan's by more than noise explains.
PRUNE_MARGIN = 1.3
DEADLINE_LEAST_S = 120.0
DEADLINE_MOST_S = 3600.0
COLD_START_S = 120.0
STEPS_ALLOWED = 30
# The first estimates may be wrong by this factor before a slow step counts as a hang.
SLOWNESS_ALLOWED = 20.0
PROGRAM_STEPS = {"min_steps": 8, "max_steps": 40}
"""A program takes long to start, and steps cost little beside that."""


class Planner:
    """What is known of one tuning, and what would be next.

    Args:
        store: where everything is kept.
        tuning: the request.
        fingerprint_key: of the environment that it is measured in.
        retried: whether a trial that was lost was tried again elsewhere already, so that its plan is given up.
    """

    def __init__(self, store: KnowledgeStore, tuning: Tuning, fingerprint_key: str, *, retried: bool = False) -> None:
        self._store, self._tuning, self._retried = store, tuning, retried
        self.fingerprint_key = fingerprint_key
        runtime = runtime_of(tuning.workload)
        self._table = legal_plans(tuning.model, tuning.cluster, tuning.workload, space=tuning.space, runtime=runtime)
        self._search: Search | None = None
        self._study: PlanStudy | None = None
        self._trials: Sequence[Trial] = ()

    def facts(
        self,
        tuning: Tuning,
        *,
        attempted: Collection[ProbeRequest] = (),
        probes_gpu_s: Sequence[float] = (),
        in_flight: int = 0,
        slots: int = 1,
    ) -> Facts:
        """Everything that the next step depends on.

        Args:
            tuning: as it stands.
            attempted: the probes that were started, whatever came of them.
            probes_gpu_s: GPU-seconds of those that ended, in order.
            in_flight: probes under way; trials under way are those that run in the store.
            slots: how many of either may be.

        Raises:
            MissingMeasurementError: the probes that would have measured it failed; trying again would fail again.
        """
        self._tuning = tuning
        if tuning.state is TuningState.PROFILING:
            missing = self._missing(attempted)
            return Facts(
                state=tuning.state,
                devices=tuning.cluster.devices,
                spent_gpu_s=tuning.gpu_s_spent,
                missing_probes=missing,
                probes_gpu_s=probes_gpu_s,
                catalog=tuning.cluster.device.kind is not DeviceKind.CPU,
                budget=tuning.budget,
                in_flight=in_flight,
                slots=slots,
            )
        if tuning.state is not TuningState.SEARCHING:
            return Facts(state=tuning.state, budget=tuning.budget)
        search = self.learn()
        flying = [trial.plan for trial in self._trials if trial.state is TrialState.RUNNING]
        return Facts(
            state=tuning.state,
            verdict=self.verdict(),
            ranking=search.ranking(),
            trials=sum(self._counts(trial) for trial in self._trials),
            affordable=self._affordable(len(flying)),
            budget=tuning.budget,
            in_flight=len(flying),
            flying=flying,
            slots=slots,
            lost_in_a_row=self._lost_in_a_row() if self._retried else 0,
            same_failure=self._same_failure() if tuning.workload.command else "",
        )

    def remember(self) -> None:
        """Stores what the tuning found as the best-known plan for its question. Doing it again changes nothing."""
        remember(self._store, self._tuning)

    # -- profile ------------------------------------------------------------------------------------------

    def _missing(self, attempted: Collection[ProbeRequest]) -> Sequence[CollectiveRequest | LayerRequest]:
        tuning = self._tuning
        workload = tuning.workload.probed
        needed = needed_probes(tuning.model, tuning.cluster, workload, self._table)
        if not is_probed(tuning.model, tuning.cluster, workload):  # a program may train what our layers are not
            needed = [each for each in needed if isinstance(each, CollectiveRequest)]
        return missing_probes(
            needed,
            self._store.collective_readings(tuning.cluster.key, self.fingerprint_key),
            self._store.layer_readings(tuning.cluster.key, self.fingerprint_key, tuning.model.key, workload.key),
            attempted,
        )

    def calibrate(self) -> Profile:
        """Fits and stores the profile from all readings of the cluster."""
        tuning, workload = self._tuning, self._tuning.workload.probed
        layers = self._store.layer_readings(tuning.cluster.key, self.fingerprint_key, tuning.model.key, workload.key)
        profile = fit_profile(
            tuning.cluster,
            self.fingerprint_key,
            self._store.collective_readings(tuning.cluster.key, self.fingerprint_key),
            [(tuning.model, workload, reading) for reading in layers],
            [],
        )
        self._store.save_profile(profile)
        return profile

    # -- search -------------------------------------------------------------------------------------------

    def learn(self) -> Search:
        """The search, after all trials that the store holds now."""
        self._trials = self._store.trials(self._tuning.id)
        search, study = self._searching()
        study.resume(self._trials, final=self._retried)
        return search

    def ask(self, confirm: Plan | None) -> Asked:
        """The plan of the next trial: what the search chooses, or a further trial of `confirm`."""
        _, study = self._searching()
        return study.ask() if confirm is None else study.repeat(confirm)

    def estimate_of(self, plan: Plan) -> Estimate | None:
        """What is believed of a plan now."""
        search, _ = self._searching()
        return search.estimate_of(plan)

    @property
    def best(self) -> RankedPlan | None:
        """The fastest plan measured so far."""
        search, _ = self._searching()
        return search.best

    def verdict(self) -> StopVerdict:
        """Whether the search is over, after what was learned last."""
        search, _ = self._searching()
        tuning = self._store.tuning(self._tuning.id)
        budget = search_budget(tuning.budget, search.ranking(), trial_gpu_s=_costliest_gpu_s(self._trials))
        if tuning.sampler is not SamplerName.PLAN:
            # What is still expected to be gained is the word of our own search: an alternative spends its budget.
            budget = budget.model_copy(update={"min_gain": 0.0})
        return search.verdict(budget, gpu_s_spent=tuning.gpu_s_spent)

    def _searching(self) -> tuple[Search, PlanStudy]:
        """The search and its study, opened the first time."""
        if self._search is None or self._study is None:
            self._search, self._study = self._open_search()
        return self._search, self._study

    def _open_search(self) -> tuple[Search, PlanStudy]:
        tuning = self._tuning
        profile = self._store.profile(tuning.cluster.key, self.fingerprint_key)
        transfers: Sequence[TransferObservation] = earlier_transfers(self._store, tuning)
        if tuning.history:
            imported = transfers_from(self._imported_runs(), tuning.cluster, self._imported_readings, profile)
            transfers = merged([*transfers, *imported])
            profile = with_links(profile, tuning.cluster, self._imported_readings(tuning.cluster))
        search = Search(
            tuning.model, tuning.cluster, tuning.workload, plans=self._table, profile=profile, transfers=transfers
        )
        other = self._alternative(search)
        # An alternative is judged by its own choices.
        first = [*self._known_best(), *self._imported_best()] if other is None else []
        return search, PlanStudy(search, first=first, alternative=other)

    # What was imported is transfers, links and first plans to measure: never a result of this tuning.

    def _imported_runs(self) -> Sequence[ImportedRun]:
        return self._store.imported_runs(self._tuning.history) if self._tuning.history else ()

    def _imported_readings(self, cluster: ClusterSpec) -> Sequence[CollectiveReading]:
        return self._store.imported_readings(self._tuning.history, cluster.key)

    def _imported_best(self) -> list[Plan]:
        tuning = self._tuning
        runs = same_request(self._imported_runs(), tuning.model, tuning.cluster, tuning.workload)
        return [plan for plan in fastest_plans(runs, limit=3) if self._table.find(plan) is not None]

    def _alternative(self, search: Search) -> Alternative | None:
        if self._tuning.sampler is SamplerName.PLAN:
            return None
        plans = [search.table.plan(row) for row in range(len(search.table))]
        return alternative(self._tuning.sampler, plans, seed=self._tuning.seed)

    def _known_best(self) -> list[Plan]:
        """The best-known plans for the same question when this tuning's trials began, if they are legal here."""
        tuning = self._tuning
        began = min((trial.started_at for trial in self._trials), default=None)
        known = self._store.best_trials(tuning.model, tuning.cluster, tuning.workload, limit=3, before=began)
        return [trial.plan for trial in known if self._table.find(trial.plan) is not None]

    def _affordable(self, in_flight: int) -> bool:
        """Whether another trial like the costliest so far fits in the budget of GPU-seconds."""
        limit = self._tuning.budget.gpu_s
        needed = (in_flight + 1) * _costliest_gpu_s([trial for trial in self._trials if self._counts(trial)])
        return limit is None or self._tuning.gpu_s_spent + needed <= limit

    def _counts(self, trial: Trial) -> bool:
        """Whether a trial has ended and counts against `max_trials`: not one that may yet be tried again."""
        return trial.finished_at is not None and (self._retried or not _lost(trial))

    def _same_failure(self) -> str:
        """How every trial so far failed, if enough of them failed in the same way: it is not the plans then."""
        ended = [trial for trial in self._trials if trial.finished_at is not None]
        told = {trial.failure.message if trial.failure is not None else "" for trial in ended}
        kinds = {trial.failure.kind for trial in ended if trial.failure is not None}
        alike = (
            len(ended) >= min(MAX_FAILED_ALIKE, len(self._table))
            and len(told) == 1
            and not kinds & {*NOT_THE_PLANS_FAULT, FailureKind.OOM}
        )
        return told.pop() if alike else ""

    def _lost_in_a_row(self) -> int:
        ended = sorted((trial for trial in self._trials if trial.finished_at is not None), key=_end_s)
        count = 0
        while count < len(ended) and _lost(ended[-1 - count]):
            count += 1
        return count


def _lost(trial: Trial) -> bool:
    return trial.failure is not None and trial.failure.kind in NOT_THE_PLANS_FAULT


def _end_s(trial: Trial) -> float:
    assert trial.finished_at is not None
    return trial.finished_at.timestamp()


def _costliest_gpu_s(trials: Sequence[Trial]) -> float:
    return max((trial.gpu_s for trial in trials), default=0.0)


def step_request(tuning: Tuning, asked: Asked, rival: RankedPlan | None) -> StepRequest:
    """The step probe of a trial; it gives up early what cannot beat `rival`, if there is one."""
    give_up_s = None
    if rival is not None:
        fastest_s = tuning.workload.tokens_per_step / (rival.tokens_per_s_per_gpu * tuning.cluster.devices)
        give_up_s = PRUNE_MARGIN * fastest_s
    request = StepRequest(
        model=tuning.model,
        workload=tuning.workload,
        plan=asked.plan,
        give_up_step_s=give_up_s,
        seed=tuning.seed,
        cold=tuning.cold,
    )
    return request.model_copy(update=PROGRAM_STEPS) if tuning.workload.command else request


def trial_deadline_s(tuning: Tuning, estimate: Estimate | None) -> float:
    """Seconds that a trial may take, from its estimate. A program's start is not in it: its file says how long."""
    if tuning.workload.command:
        return DEADLINE_MOST_S
    steps_s = STEPS_ALLOWED * SLOWNESS_ALLOWED * (estimate.step_time_s if estimate else 1.0)
    start_s = COLD_START_S if tuning.cold else 0.0
    return start_s + min(max(DEADLINE_LEAST_S, steps_s), DEADLINE_MOST_S)
