"""One trial from start to stored end: whatever ends the step probe, the stored trial ends too."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from autotune.ports.store import Prober, Store
from autotune.search.ranking import RankedPlan
from autotune.search.study import Asked
from autotune.specs import (
    Estimate,
    Failure,
    FailureKind,
    StepReading,
    StepRequest,
    Trial,
    TrialState,
    Tuning,
)
from autotune.tuning.events import OnEvent, Progressed, TrialStarted

# A trial is given up as pruned when its steps are slower than the best plan's by more than noise explains.
PRUNE_MARGIN = 1.3
DEADLINE_LEAST_S = 120.0
DEADLINE_MOST_S = 3600.0
COLD_START_S = 120.0
STEPS_ALLOWED = 30
# The first estimates may be wrong by this factor before a slow step counts as a hang.
SLOWNESS_ALLOWED = 20.0


class TrialRunner:
    """Runs trials on one prober and keeps them in one store.

    Args:
        store: gets each trial before it runs and its result after.
        prober: measures.
        fingerprint_key: of the prober's ranks.
        owner: the process that runs the trials.
        on_event: told of start and progress.
    """

    def __init__(self, store: Store, prober: Prober, fingerprint_key: str, owner: str, on_event: OnEvent) -> None:
        self._store, self._prober, self._on_event = store, prober, on_event
        self._fingerprint_key, self._owner = fingerprint_key, owner

    def run(self, tuning: Tuning, asked: Asked, estimate: Estimate | None, *, rival: RankedPlan | None) -> Trial:
        """Runs one plan; gives up early what cannot beat `rival`. None there means a repeat or nothing to beat yet.

        Raises:
            ProberError: nothing to measure with. Like an interrupt, it leaves the trial ended as cancelled.
        """
        trial = self._start(tuning, asked, estimate)
        self._on_event(TrialStarted(trial=trial))
        try:
            outcome = self._prober.run(
                step_request(tuning, asked, rival),
                deadline_s=trial_deadline_s(tuning, estimate),
                on_progress=lambda progress: self._on_event(Progressed(progress=progress, plan=asked.plan)),
            )
        except BaseException as error:
            cause = f"the tuning was interrupted ({type(error).__name__})"
            held_s = (datetime.now(UTC) - trial.started_at).total_seconds()
            failure = Failure(kind=FailureKind.CANCELLED, message=cause)
            self._finish(trial, None, failure, held_s * tuning.cluster.devices, 0.0)
            raise
        reading = next((item for item in outcome.readings if isinstance(item, StepReading)), None)
        return self._finish(trial, reading, outcome.failure, outcome.gpu_s, outcome.setup_s)

    def _start(self, tuning: Tuning, asked: Asked, estimate: Estimate | None) -> Trial:
        trial = Trial(
            id=uuid.uuid4().hex,
            tuning_id=tuning.id,
            number=asked.number,
            plan=asked.plan,
            state=TrialState.RUNNING,
            estimate=estimate,
            fingerprint_key=self._fingerprint_key,
            owner=self._owner,
            started_at=datetime.now(UTC),
        )
        self._store.start_trial(trial)
        return trial

    def _finish(
        self, trial: Trial, reading: StepReading | None, failure: Failure | None, gpu_s: float, setup_s: float
    ) -> Trial:
        return self._store.finish_trial(
            trial.id,
            reading=reading,
            failure=failure,
            outcome_gpu_s=gpu_s,
            setup_s=setup_s,
            fingerprint_key=self._fingerprint_key,
        )


def fail_lost_trials(store: Store, tuning_id: str) -> None:
    """Ends the trials that were running when their process died as what they are: lost."""
    for trial in store.trials(tuning_id):
        if trial.state is TrialState.RUNNING:
            message = f"the process that ran this trial ({trial.owner or 'unknown'}) is gone"
            store.finish_trial(
                trial.id,
                reading=None,
                failure=Failure(kind=FailureKind.LOST, message=message),
                outcome_gpu_s=0.0,
                setup_s=0.0,
                fingerprint_key=trial.fingerprint_key,
            )


def step_request(tuning: Tuning, asked: Asked, rival: RankedPlan | None) -> StepRequest:
    """The step probe of a trial; it gives up early what cannot beat `rival`, if there is one."""
    give_up_s = None
    if rival is not None:
        fastest_s = tuning.workload.tokens_per_step / (rival.tokens_per_s_per_gpu * tuning.cluster.devices)
        give_up_s = PRUNE_MARGIN * fastest_s
    return StepRequest(
        model=tuning.model,
        workload=tuning.workload,
        plan=asked.plan,
        give_up_step_s=give_up_s,
        seed=tuning.seed,
        cold=tuning.cold,
    )


def trial_deadline_s(tuning: Tuning, estimate: Estimate | None) -> float:
    """Seconds that a trial may take, from its estimate."""
    steps_s = STEPS_ALLOWED * SLOWNESS_ALLOWED * (estimate.step_time_s if estimate else 1.0)
    start_s = COLD_START_S if tuning.cold else 0.0
    return start_s + min(max(DEADLINE_LEAST_S, steps_s), DEADLINE_MOST_S)
