"""A campaign: one process's hold on one tuning, rebuilt from the store at any time.

It owns the ranks while it lives; everything that must survive it is in the store.
"""

from __future__ import annotations

from datetime import UTC, datetime

from autotune.errors import MissingMeasurementError, StoreConflictError
from autotune.ports.store import KnowledgeStore, Prober
from autotune.specs import CollectiveRequest, LayerRequest, Plan, ProbeRequest, Tuning, TuningState
from autotune.tuning.events import Event, OnEvent, ProbeEnded, ProbeStarted, Progressed, StateChanged, TrialEnded
from autotune.tuning.lifecycle import Facts, NextStep, StepKind, next_step
from autotune.tuning.ownership import owner_lives, process_owner
from autotune.tuning.planner import PROBE_DEADLINE_S, Planner
from autotune.tuning.trial_run import TrialRunner, fail_lost_trials


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

    def __init__(self, store: KnowledgeStore, prober: Prober, tuning: Tuning, on_event: OnEvent) -> None:
        self._store, self._prober, self._on_event = store, prober, on_event
        self._owner = process_owner()
        if tuning.owner and tuning.owner != self._owner and owner_lives(tuning.owner):
            raise StoreConflictError(f"tuning {tuning.id} is being run by process {tuning.owner}")
        self._tuning = tuning
        self._save(owner=self._owner)
        fail_lost_trials(store, tuning.id)
        self._attempted: list[ProbeRequest] = []
        self._planner = Planner(store, tuning, store.put_fingerprint(prober.fingerprint()))
        self._runner = TrialRunner(store, prober, self._planner.fingerprint_key, self._owner, on_event)

    @property
    def tuning(self) -> Tuning:
        """The tuning as it stands."""
        return self._tuning

    def facts(self) -> Facts:
        """Everything that the next step depends on."""
        return self._planner.facts(self._tuning, attempted=self._attempted)

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

    def close(self) -> None:
        """Lets go of the study's database."""
        self._planner.close()

    def _take(self, step: NextStep, remaining: int) -> None:
        match step.kind:
            case StepKind.START:
                self._save(state=TuningState.PROFILING)
            case StepKind.PROBE:
                assert isinstance(step.probe, CollectiveRequest | LayerRequest)
                self._probe(step.probe, remaining)
            case StepKind.CALIBRATE:
                self._planner.calibrate()
                self._save(state=TuningState.SEARCHING)
            case StepKind.TRIAL | StepKind.CONFIRM:
                self._trial(step.plan)
            case StepKind.FINISH:
                self._planner.remember()
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
            fingerprint_key=self._planner.fingerprint_key,
            request=request,
            outcome=outcome,
        )
        self._emit(ProbeEnded(request=request, outcome=outcome))

    def _trial(self, confirm: Plan | None) -> None:
        asked = self._planner.ask(confirm)
        best = self._planner.best if confirm is None else None
        ended = self._runner.run(self._tuning, asked, self._planner.estimate_of(asked.plan), rival=best)
        self._planner.learn()
        self._tuning = self._store.tuning(self._tuning.id)
        verdict = self._planner.verdict()
        self._emit(TrialEnded(trial=ended, verdict=verdict, gpu_s_spent=self._tuning.gpu_s_spent))
