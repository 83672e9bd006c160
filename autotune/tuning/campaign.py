"""A campaign: one process's hold on one tuning, rebuilt from the store at any time.

It owns the ranks, the search and the study while it lives; everything that must survive it is in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from autotune.cost.calibrate import fit_profile
from autotune.errors import MissingMeasurementError, StoreConflictError
from autotune.search.alternatives import Alternative, alternative
from autotune.search.core import NOT_THE_PLANS_FAULT, Search
from autotune.search.space import Runtime, legal_plans
from autotune.search.stopping import Verdict
from autotune.search.study import PlanStudy
from autotune.specs import (
    CollectiveRequest,
    LayerRequest,
    Plan,
    ProbeRequest,
    Profile,
    SamplerName,
    Trial,
    Tuning,
    TuningState,
)
from autotune.tuning.events import Event, OnEvent, ProbeEnded, ProbeStarted, Progressed, StateChanged, TrialEnded
from autotune.tuning.lifecycle import Facts, NextStep, StepKind, next_step, search_budget
from autotune.tuning.ownership import owner_lives, process_owner
from autotune.tuning.ports import Prober, Store
from autotune.tuning.profiling import missing_probes, needed_probes
from autotune.tuning.trial_run import TrialRunner, fail_lost_trials

PROBE_DEADLINE_S = 120.0


def counts(trial: Trial) -> bool:
    """Whether a trial has ended and counts against `max_trials`: one that was lost or cancelled does not."""
    lost = trial.failure is not None and trial.failure.kind in NOT_THE_PLANS_FAULT
    return trial.finished_at is not None and not lost


class Campaign:
    """Advances one tuning, step by step.

    Args:
        store: where everything is kept.
        prober: measures.
        tuning: the request as stored.
        on_event: told of everything that happens.

    Raises:
        StoreConflictError: another living process owns the tuning.
    """

    def __init__(self, store: Store, prober: Prober, tuning: Tuning, on_event: OnEvent) -> None:
        self._store, self._prober, self._on_event = store, prober, on_event
        self._owner = process_owner()
        if tuning.owner and tuning.owner != self._owner and owner_lives(tuning.owner):
            raise StoreConflictError(f"tuning {tuning.id} is being run by process {tuning.owner}")
        self._tuning = tuning
        self._save(owner=self._owner)
        fail_lost_trials(store, tuning.id)
        self._table = legal_plans(
            tuning.model, tuning.cluster, tuning.workload, space=tuning.space, runtime=Runtime.TORCH
        )
        self._attempted: list[ProbeRequest] = []
        self._fingerprint_key = store.put_fingerprint(prober.fingerprint())
        self._runner = TrialRunner(store, prober, self._fingerprint_key, self._owner, on_event)
        self._search: Search | None = None
        self._study: PlanStudy | None = None

    @property
    def tuning(self) -> Tuning:
        """The tuning as it stands."""
        return self._tuning

    def facts(self) -> Facts:
        """Everything that the next step depends on."""
        state = self._tuning.state
        missing = self._missing() if state is TuningState.PROFILING else ()
        if state is not TuningState.SEARCHING:
            return Facts(state=state, missing_probes=missing, budget=self._tuning.budget)
        search, _ = self._searching()
        ended = [trial for trial in self._store.trials(self._tuning.id) if counts(trial)]
        return Facts(
            state=state,
            verdict=self._verdict(search),
            standings=search.standings(),
            trials=len(ended),
            affordable=self._affordable(ended),
            budget=self._tuning.budget,
        )

    def advance(self) -> bool:
        """Takes one step; False when the tuning has ended. A crash at any line can be resumed."""
        try:
            facts = self.facts()
        except MissingMeasurementError as error:
            # The probes that would have measured it failed; trying again would fail again.
            self._save(state=TuningState.FAILED, message=str(error), stop_reason=str(error), owner="")
            return False
        step = next_step(facts)
        if step.kind is StepKind.NOTHING:
            return False
        self._take(step, remaining=len(facts.missing_probes))
        return True

    def release(self) -> None:
        """Lets go of the tuning, for another process to resume."""
        self._save(owner="")

    def _take(self, step: NextStep, remaining: int) -> None:
        match step.kind:
            case StepKind.START:
                self._save(state=TuningState.PROFILING)
            case StepKind.PROBE:
                assert isinstance(step.probe, CollectiveRequest | LayerRequest)
                self._probe(step.probe, remaining)
            case StepKind.CALIBRATE:
                self._calibrate()
                self._save(state=TuningState.SEARCHING)
            case StepKind.TRIAL | StepKind.CONFIRM:
                self._trial(step.plan)
            case StepKind.FINISH:
                self._save(state=TuningState.DONE, stop_reason=step.reason, owner="")
            case _:
                self._save(state=TuningState.FAILED, message=step.reason, stop_reason=step.reason, owner="")

    def _save(self, **changes: object) -> None:
        updated = self._tuning.model_copy(update={**changes, "updated_at": datetime.now(UTC)})
        self._store.save_tuning(updated, expected_owner=self._tuning.owner)
        stated = updated.state is not self._tuning.state
        self._tuning = self._store.tuning(updated.id)
        if stated:
            self._emit(StateChanged(tuning=self._tuning))

    def _emit(self, event: Event) -> None:
        self._on_event(event)

    # -- profile ------------------------------------------------------------------------------------------

    def _missing(self) -> Sequence[CollectiveRequest | LayerRequest]:
        tuning = self._tuning
        return missing_probes(
            needed_probes(tuning.model, tuning.cluster, tuning.workload, self._table),
            self._store.collective_readings(tuning.cluster.key, self._fingerprint_key),
            self._store.layer_readings(
                tuning.cluster.key, self._fingerprint_key, tuning.model.key, tuning.workload.key
            ),
            self._attempted,
        )

    def _probe(self, request: CollectiveRequest | LayerRequest, remaining: int) -> None:
        self._emit(ProbeStarted(request=request, remaining=remaining))
        outcome = self._prober.run(
            request,
            deadline_s=PROBE_DEADLINE_S,
            on_progress=lambda progress: self._emit(Progressed(progress=progress, plan=None)),
        )
        self._attempted.append(request)
        self._store.save_probe(
            tuning_id=self._tuning.id,
            cluster=self._tuning.cluster,
            fingerprint_key=self._fingerprint_key,
            request=request,
            outcome=outcome,
        )
        self._emit(ProbeEnded(request=request, outcome=outcome))

    def _calibrate(self) -> Profile:
        tuning = self._tuning
        layers = self._store.layer_readings(
            tuning.cluster.key, self._fingerprint_key, tuning.model.key, tuning.workload.key
        )
        profile = fit_profile(
            tuning.cluster,
            self._fingerprint_key,
            self._store.collective_readings(tuning.cluster.key, self._fingerprint_key),
            [(tuning.model, tuning.workload, reading) for reading in layers],
            [],
        )
        self._store.save_profile(profile)
        return profile

    # -- search -------------------------------------------------------------------------------------------

    def _searching(self) -> tuple[Search, PlanStudy]:
        """The search and its study, rebuilt from the store the first time."""
        if self._search is None or self._study is None:
            self._search, self._study = self._open_search()
        return self._search, self._study

    def _open_search(self) -> tuple[Search, PlanStudy]:
        tuning = self._tuning
        profile = self._store.profile(tuning.cluster.key, self._fingerprint_key)
        search = Search(tuning.model, tuning.cluster, tuning.workload, plans=self._table, profile=profile)
        other = self._alternative(search)
        study = PlanStudy(search, name=f"tuning-{tuning.id}", url=self._store.study_url(), alternative=other)
        trials = self._store.trials(tuning.id)
        study.resume(trials)
        if not trials and other is None:  # an alternative is judged by its own choices
            study.enqueue(self._known_best())
        return search, study

    def _alternative(self, search: Search) -> Alternative | None:
        if self._tuning.sampler is SamplerName.PLAN:
            return None
        plans = [search.table.plan(row) for row in range(len(search.table))]
        return alternative(self._tuning.sampler, plans, seed=self._tuning.seed)

    def _known_best(self) -> list[Plan]:
        """The best-known plans of earlier tunings for the same question, if they are legal here."""
        tuning = self._tuning
        known = self._store.best_trials(tuning.model, tuning.cluster, tuning.workload, limit=3)
        return [trial.plan for trial in known if self._table.find(trial.plan) is not None]

    def _affordable(self, ended: Sequence[Trial]) -> bool:
        """Whether another trial like the costliest so far fits in the budget of GPU-seconds."""
        limit = self._tuning.budget.gpu_s
        return limit is None or self._tuning.gpu_s_spent + _costliest_gpu_s(ended) <= limit

    def _verdict(self, search: Search) -> Verdict:
        spent = self._store.tuning(self._tuning.id).gpu_s_spent
        cost = _costliest_gpu_s(self._store.trials(self._tuning.id))
        budget = search_budget(self._tuning.budget, search.standings(), trial_gpu_s=cost)
        if self._tuning.sampler is not SamplerName.PLAN:
            # What is still expected to be gained is the word of our own search: an alternative spends its budget.
            budget = budget.model_copy(update={"min_gain": 0.0})
        return search.verdict(budget, gpu_s_spent=spent)

    def _trial(self, confirm: Plan | None) -> None:
        search, study = self._searching()
        asked = study.ask() if confirm is None else study.repeat(confirm)
        best = search.best if confirm is None else None
        ended = self._runner.run(self._tuning, asked, search.estimate_of(asked.plan), beat=best)
        result = ended.reading or ended.failure
        assert result is not None
        study.tell(asked.number, asked.plan, result, gpu_s=ended.gpu_s)
        self._tuning = self._store.tuning(self._tuning.id)
        self._emit(TrialEnded(trial=ended, verdict=self._verdict(search), gpu_s_spent=self._tuning.gpu_s_spent))


def _costliest_gpu_s(trials: Sequence[Trial]) -> float:
    return max((trial.gpu_s for trial in trials), default=0.0)
