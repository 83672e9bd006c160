"""What must be true of a tuning of the fleet that has ended, whatever was killed meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psycopg
import pytest

from autotune.fleet.failures import MAX_ATTEMPTS
from autotune.specs import EventKind, FailureKind, Job, JobState, Trial, TrialState, Tuning, TuningState
from autotune.wiring import merge_reports
from storage import SqlStore

OF_KILLS = {FailureKind.LOST, FailureKind.CRASH, FailureKind.COMMUNICATION, FailureKind.HANG, FailureKind.UNAVAILABLE}
"""What a kill may be told as. Never OOM: that would teach memory something that nobody measured."""


NOT_HELD = """
    SELECT leases.node, jobs.id, jobs.state FROM leases JOIN jobs ON jobs.id = leases.job_id
    WHERE jobs.state NOT IN ('granted', 'reported') OR jobs.token <> leases.token
"""


def assert_leases_held(database_url: str) -> None:
    """Each lease is that of a job under way."""
    with psycopg.connect(database_url) as connection:
        assert connection.execute(NOT_HELD).fetchall() == []


def assert_grows_only(store: SqlStore, tunings: Sequence[str], finished: dict[str, Trial]) -> None:
    """A trial that was seen to have finished is never lost or changed; takes note of those that have finished since."""
    for tuning_id in tunings:
        trials = {trial.id: trial for trial in store.trials(tuning_id) if trial.state is not TrialState.RUNNING}
        for trial in trials.values():
            assert finished.setdefault(trial.id, trial) == trial
        assert {trial.id for trial in finished.values() if trial.tuning_id == tuning_id} == trials.keys()


def assert_truthful(store: SqlStore, tuning: Tuning) -> tuple[Sequence[Trial], Sequence[Job]]:
    """The tuning's end, trials, jobs, events and GPU-seconds agree; returns its trials and jobs."""
    trials, jobs = store.trials(tuning.id), store.jobs(tuning_id=tuning.id)
    assert tuning.state in {TuningState.DONE, TuningState.FAILED}
    assert tuning.stop_reason
    if tuning.state is TuningState.DONE:
        assert any(trial.state is TrialState.COMPLETE for trial in trials)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(trial.state is not TrialState.RUNNING for trial in trials)
    assert all(trial.failure.kind in OF_KILLS for trial in trials if trial.failure is not None)
    _assert_told_once(store, tuning, trials)
    _assert_run_once(trials, jobs)
    spent_s = sum(merge_reports(job).outcome.gpu_s for job in jobs)
    assert tuning.gpu_s_spent == pytest.approx(spent_s, rel=1e-9)
    return trials, jobs


def _assert_told_once(store: SqlStore, tuning: Tuning, trials: Sequence[Trial]) -> None:
    events = store.events(tuning.id, limit=10_000)
    for kind in (EventKind.TRIAL_STARTED, EventKind.TRIAL_ENDED):
        told = Counter(event.data["trial_id"] for event in events if event.kind is kind)
        assert told == Counter(trial.id for trial in trials)
    states = [event.data["state"] for event in events if event.kind is EventKind.STATE]
    assert states[-1] == tuning.state
    assert sum(TuningState(state).ended for state in states) == 1


def _assert_run_once(trials: Sequence[Trial], jobs: Sequence[Job]) -> None:
    """Each trial and probe has attempts 1, 2, ... of which only the last may have measured; what measured is stored."""
    assert all(job.state is JobState.ENDED for job in jobs)
    attempts: dict[str, list[Job]] = {}
    for job in jobs:
        attempts.setdefault(job.trial_id or job.request.to_json(), []).append(job)
        assert (merge_reports(job).outcome.failure is None) is (job.failure is None)
    for each in attempts.values():
        each.sort(key=lambda job: job.attempt)
        assert [job.attempt for job in each] == list(range(1, len(each) + 1))
        assert len(each) <= MAX_ATTEMPTS
        assert all(job.failure is not None for job in each[:-1])
    for trial in trials:
        last = attempts[trial.id][-1]
        outcome = merge_reports(last).outcome
        assert (trial.reading is None) is (last.failure is not None)
        assert trial.gpu_s == pytest.approx(outcome.gpu_s)
        if trial.reading is not None:
            assert trial.reading.step_times_s == outcome.readings[0].step_times_s  # type: ignore[union-attr]
