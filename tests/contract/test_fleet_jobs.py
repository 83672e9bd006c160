"""The rules of FleetStore about a job's begin and end: with its trial, in one transaction, once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fleet_records import LONG_S, POOL, granted, job, live_tuning, node, pair, reported, trial_job
from sqlalchemy import Connection, event
from store_records import COLLECTIVE_OUTCOME, FAILURE, FINGERPRINT, MOMENT, step_reading, trial, tuning

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import (
    EventKind,
    Failure,
    FailureKind,
    Job,
    JobPurpose,
    JobState,
    ProbeOutcome,
    TrialState,
    TuningState,
)
from storage import SqlStore

LOST = Failure(kind=FailureKind.LOST, message="node b is gone")
MEASURED = ProbeOutcome(readings=(step_reading(),), wall_s=2.0, gpu_s=16.0, setup_s=1.0)
FAILED = ProbeOutcome(failure=LOST, wall_s=2.0, gpu_s=16.0, setup_s=0.0)


def reported_trial(store: SqlStore, **changes: object) -> Job:
    """A trial's job that all members have reported."""
    pair(store)
    first = live_tuning(store)
    store.create_job(trial_job("job-1", first, **changes), trial=first, expected_owner="tuner")
    found = store.grant("job-1", ["a", "b"], lease_s=LONG_S, world_id="w1", warm=False)
    assert found is not None
    return reported(store, found)


def end(store: SqlStore, found: Job, outcome: ProbeOutcome, **changes: object) -> Job | None:
    defaults: dict[str, object] = {"failure": outcome.failure, "fingerprint_key": FINGERPRINT.key}
    return store.end_job(found.id, found.token, outcome, **(defaults | changes))  # type: ignore[arg-type]


def retry_of(found: Job) -> Job:
    return trial_job("job-2", trial(0), attempt=2, avoid=("b",), created_at=found.created_at)


def kinds(store: SqlStore) -> list[EventKind]:
    return [event.kind for event in store.events("tuning-1")]


def test_a_job_comes_back_equal(store: SqlStore) -> None:
    live_tuning(store)
    new = job("job-1", tuning_id="tuning-1", avoid=("x", "y"), attempt=2, message="again", only_node="a")
    store.create_job(new)
    assert store.job("job-1") == new
    with pytest.raises(StoreConflictError, match="job-1"):
        store.create_job(new)
    with pytest.raises(UnknownNameError, match="no-such-job"):
        store.job("no-such-job")
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.create_job(job("job-2", tuning_id="no-tuning"))


def test_jobs_come_oldest_first_by_pool_tuning_and_state(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    for minute, (name, changes) in enumerate(
        (("late", {}), ("elsewhere", {"pool": "elsewhere"}), ("ours", {"tuning_id": "tuning-1"}))
    ):
        store.create_job(job(name, created_at=MOMENT + timedelta(minutes=-minute), **changes))
    granted(store, job("running", created_at=MOMENT - timedelta(hours=1)))
    assert [each.id for each in store.jobs()] == ["running", "ours", "elsewhere", "late"]
    assert [each.id for each in store.jobs(limit=2)] == ["running", "ours"]
    assert [each.id for each in store.jobs(limit=2, after="ours")] == ["elsewhere", "late"]
    assert [each.id for each in store.jobs(states=[JobState.QUEUED], after="ours")] == ["elsewhere", "late"]
    with pytest.raises(UnknownNameError, match="no-such-job"):
        store.jobs(after="no-such-job")
    assert [each.id for each in store.jobs(pool=POOL, states=[JobState.QUEUED])] == ["ours", "late"]
    assert [each.id for each in store.jobs(states=[JobState.GRANTED, JobState.ENDED])] == ["running"]
    assert [each.id for each in store.jobs(tuning_id="tuning-1")] == ["ours"]
    assert len(store.jobs(states=[JobState.GRANTED])[0].members) == 2


def test_a_long_queue_of_one_does_not_hide_the_jobs_of_others(store: SqlStore) -> None:
    pair(store)
    for number, (who, changes) in enumerate(
        [("ada", {}), ("ada", {}), ("ada", {}), ("ben", {}), ("ada", {"purpose": JobPurpose.HEALTH, "only_node": "a"})]
    ):
        store.create_job(job(f"job-{number}", principal=who, created_at=MOMENT + timedelta(minutes=number), **changes))
    store.create_job(job("elsewhere", pool="elsewhere"))
    granted(store, job("running", principal="ben"))
    assert [each.id for each in store.queued_jobs(POOL, most_each=2)] == ["job-0", "job-1", "job-3", "job-4"]
    assert [each.id for each in store.queued_jobs(POOL, most_each=9)] == [f"job-{number}" for number in range(5)]


def test_a_trial_and_its_job_are_stored_together_or_not_at_all(store: SqlStore) -> None:
    first = live_tuning(store)
    store.create_job(trial_job("job-1", first), trial=first, expected_owner="tuner")
    assert list(store.trials("tuning-1")) == [first]
    other = first.model_copy(update={"id": "another trial of that number"})
    with pytest.raises(StoreConflictError):
        store.create_job(trial_job("job-2", other), trial=other, expected_owner="tuner")
    second = trial(1)
    with pytest.raises(StoreConflictError, match="job-1"):
        store.create_job(trial_job("job-1", second), trial=second, expected_owner="tuner")
    assert [each.id for each in store.jobs()] == ["job-1"]
    assert list(store.trials("tuning-1")) == [first]
    assert kinds(store) == [EventKind.STATE, EventKind.STATE, EventKind.TRIAL_STARTED]


def test_a_tuner_that_lost_its_claim_starts_nothing(store: SqlStore) -> None:
    first = live_tuning(store)
    new = trial_job("job-1", first)

    def refuse(owner: str, reason: str) -> None:
        with pytest.raises(StoreConflictError, match=reason):
            store.create_job(new, trial=first, expected_owner=owner)

    refuse("another", "'tuner', not by 'another'")
    store.release_tuning("tuning-1", "tuner")
    refuse("tuner", "'', not by 'tuner'")
    store.claim_tuning("tuning-1", "tuner", lease_s=0.0)
    store.claim_tuning("tuning-1", "successor", lease_s=LONG_S)
    refuse("tuner", "'successor', not by 'tuner'")
    store.save_tuning(store.tuning("tuning-1").model_copy(update={"state": TuningState.CANCELLED}))
    refuse("successor", "cancelled")
    with pytest.raises(StoreConflictError, match="no tuning"):
        store.create_job(job("job-2"), expected_owner="tuner")
    assert store.jobs() == []
    assert store.trials("tuning-1") == []


def test_a_measured_trial_is_stored_and_its_nodes_are_free(store: SqlStore) -> None:
    found = reported_trial(store)
    ended = end(store, found, MEASURED, warm_nodes=["a"])
    assert ended == store.job("job-1")
    assert (ended.state, ended.failure) == (JobState.ENDED, None)
    assert ended.ended_at is not None
    (done,) = store.trials("tuning-1")
    assert (done.state, done.reading, done.gpu_s) == (TrialState.COMPLETE, step_reading(), 16.0)
    assert store.leased_nodes() == {}
    assert [each.world_id for each in store.nodes()] == ["w1", ""]
    assert store.tuning("tuning-1").gpu_s_spent == 16.0
    assert kinds(store)[-2:] == [EventKind.JOB_GRANTED, EventKind.TRIAL_ENDED]


def test_a_job_ends_once_under_its_token_when_it_is_reported(store: SqlStore) -> None:
    pair(store)
    early = granted(store, job("job-0"), ("a",))
    assert end(store, early, COLLECTIVE_OUTCOME) is None
    end(store, reported(store, early), COLLECTIVE_OUTCOME)
    found = reported_trial(store)
    assert store.end_job("job-1", found.token - 1, MEASURED, failure=None, fingerprint_key=FINGERPRINT.key) is None
    assert store.job("job-1") == found
    ended = end(store, found, MEASURED)
    assert end(store, found, FAILED) is None
    assert end(store, found, FAILED, retry=retry_of(found)) is None
    assert store.job("job-1") == ended
    assert store.trials("tuning-1")[0].reading == step_reading()
    assert store.tuning("tuning-1").gpu_s_spent == 16.0


def test_what_cannot_be_stored_leaves_the_job_as_it_was(store: SqlStore) -> None:
    found = reported_trial(store)
    store.create_job(job("taken"))
    with pytest.raises(UnknownNameError, match="never-stored"):
        end(store, found, MEASURED, fingerprint_key="never-stored")
    with pytest.raises(StoreConflictError, match="taken"):
        end(store, found, FAILED, retry=retry_of(found).model_copy(update={"id": "taken"}))
    assert store.job("job-1") == found
    assert store.leased_nodes() == {"a": "job-1", "b": "job-1"}
    assert store.tuning("tuning-1").gpu_s_spent == 0.0


def test_a_retry_takes_the_place_of_the_job_and_the_trial_goes_on(store: SqlStore) -> None:
    found = reported_trial(store)
    retry = retry_of(found)
    ended = end(store, found, FAILED, retry=retry)
    assert ended is not None
    assert (ended.state, ended.failure, ended.message) == (JobState.ENDED, FailureKind.LOST, LOST.message)
    assert store.job("job-2") == retry
    assert store.trials("tuning-1")[0].state is TrialState.RUNNING
    assert store.tuning("tuning-1").gpu_s_spent == 16.0
    assert store.leased_nodes() == {}
    last = store.events("tuning-1")[-1]
    assert last.kind is EventKind.JOB_RETRIED
    assert last.data["failure"]["kind"] == "lost"
    assert (last.data["job_id"], last.data["retry_job_id"], last.data["avoid"]) == ("job-1", "job-2", ["b"])


def test_the_decided_failure_is_the_one_that_is_stored(store: SqlStore) -> None:
    found = reported_trial(store)
    end(store, found, MEASURED, failure=FAILURE)
    (done,) = store.trials("tuning-1")
    assert (done.state, done.failure, done.reading) == (TrialState.FAILED, FAILURE, None)


@pytest.mark.parametrize("cancel", ["jobs", "tuning"])
def test_nothing_is_tried_again_once_it_is_cancelled(store: SqlStore, cancel: str) -> None:
    found = reported_trial(store)
    if cancel == "jobs":
        store.cancel_jobs("tuning-1")
    else:
        store.save_tuning(store.tuning("tuning-1").model_copy(update={"state": TuningState.CANCELLED}))
    assert end(store, found, FAILED, retry=retry_of(found)) is not None
    assert [each.id for each in store.jobs()] == ["job-1"]
    (done,) = store.trials("tuning-1")
    assert done.failure is not None
    assert (done.state, done.failure.kind) == (TrialState.FAILED, FailureKind.CANCELLED)
    assert store.leased_nodes() == {}


def test_a_trial_that_was_given_up_does_not_hold_its_nodes(store: SqlStore) -> None:
    found = reported_trial(store)
    given_up = store.finish_trial(
        found.trial_id or "", reading=None, failure=LOST, outcome_gpu_s=0.0, setup_s=0.0, fingerprint_key=""
    )
    assert end(store, found, MEASURED) is not None
    assert list(store.trials("tuning-1")) == [given_up]
    assert store.leased_nodes() == {}


@pytest.mark.parametrize("purpose", [JobPurpose.PROFILE, JobPurpose.HEALTH, JobPurpose.REGRESSION])
def test_a_probe_is_stored_with_its_readings(store: SqlStore, purpose: JobPurpose) -> None:
    pair(store)
    found = reported(store, granted(store, job("job-1", purpose=purpose)))
    end(store, found, COLLECTIVE_OUTCOME)
    assert list(store.collective_readings(found.cluster.key, FINGERPRINT.key)) == list(COLLECTIVE_OUTCOME.readings)
    assert len(store.measurements_page("collective")) == 2


def test_a_failed_probe_of_a_tuning_is_told(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    found = reported(store, granted(store, job("job-1", tuning_id="tuning-1")))
    end(store, found, FAILED, fingerprint_key="")
    last = store.events("tuning-1")[-1]
    assert last.kind is EventKind.PROBE_ENDED
    assert (last.data["readings"], last.data["failure"]["kind"], last.data["gpu_s"]) == (0, "lost", 16.0)
    assert last.data["request"]["group_size"] == found.request.group_size  # type: ignore[union-attr]
    assert store.tuning("tuning-1").gpu_s_spent == 16.0


def test_cancelling_ends_what_waits_and_marks_what_runs(store: SqlStore) -> None:
    found = reported_trial(store)
    second = trial(1)
    store.create_job(trial_job("waiting", second), trial=second)
    for name in ("c", "d"):
        store.register_node(node(name))
    running = granted(store, job("running", tuning_id="tuning-1"), ("c", "d"))
    started = store.start_member("running", running.token, "c", "s1", lease_s=LONG_S)
    assert started is not None
    store.create_job(job("another's"))
    still = store.cancel_jobs("tuning-1")
    assert [(each.id, each.cancelled) for each in still] == [("running", True)]
    order = store.renew_member("running", running.token, "c", "s1", lease_s=LONG_S)
    assert (order.go_on, order.failure) == (False, FailureKind.CANCELLED)
    waiting = store.job("waiting")
    assert (waiting.state, waiting.cancelled, waiting.failure) == (JobState.ENDED, True, FailureKind.CANCELLED)
    assert store.grant("waiting", ["c", "d"], lease_s=LONG_S, world_id="w", warm=False) is None
    assert [each.state for each in store.trials("tuning-1")] == [TrialState.RUNNING, TrialState.FAILED]
    # What was measured before is kept.
    assert end(store, found, MEASURED) is not None
    assert store.trials("tuning-1")[0].reading == step_reading()
    assert [each.id for each in store.cancel_jobs("tuning-1")] == ["running"]
    assert store.job("another's").state is JobState.QUEUED
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.cancel_jobs("no-tuning")


def test_what_many_jobs_are_about_is_in_memory_once(store: SqlStore) -> None:
    """A tuner keeps a thousand parsed requests, each for a seed of its own: with a model each it grew by the hour."""
    first = live_tuning(store)
    found = [trial_job(f"job-{seed}", first) for seed in range(3)]
    for seed, each in enumerate(found):
        request = each.request.model_copy(update={"seed": 7000 + seed})
        store.create_job(each.model_copy(update={"request": request, "trial_id": None}))
    requests = [each.request for each in store.jobs()]
    assert [each.seed for each in requests] == [7000, 7001, 7002]
    assert all(each.model is requests[0].model for each in requests)
    assert all(each.workload is requests[0].workload for each in requests)


def statements_to_cancel(store: SqlStore, tuning_id: str, trials: int) -> int:
    live_tuning(store, tuning_id)
    for number in range(trials):
        waiting = trial(number, tuning_id)
        queued = job(f"{tuning_id}-{number}", tuning_id=tuning_id).model_copy(update={"trial_id": waiting.id})
        store.create_job(queued, trial=waiting)
    sent: list[str] = []

    def note(_connection: Connection, _cursor: object, statement: str, *_rest: object) -> None:
        sent.append(statement)

    with store.reading() as session:
        engine = session.get_bind().engine
    event.listen(engine, "before_cursor_execute", note)
    store.cancel_tuning(tuning_id, ["ada"], "enough")
    event.remove(engine, "before_cursor_execute", note)
    assert [each.state for each in store.trials(tuning_id)] == [TrialState.FAILED] * trials
    assert sum(each.kind is EventKind.TRIAL_ENDED for each in store.events(tuning_id)) == trials
    assert {each.state for each in store.jobs(tuning_id=tuning_id)} == {JobState.ENDED}
    return len(sent)


def test_cancelling_takes_as_many_statements_however_much_waits(store: SqlStore) -> None:
    few, many = statements_to_cancel(store, "few", 2), statements_to_cancel(store, "many", 20)
    assert few == many <= 18


def test_a_job_of_no_tuning_is_cancelled_while_it_waits(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    store.create_job(job("waiting"))
    assert store.cancel_job("waiting")
    ended = store.job("waiting")
    assert (ended.state, ended.cancelled, ended.failure) == (JobState.ENDED, True, FailureKind.CANCELLED)
    granted(store, job("running"))
    store.create_job(job("of-a-tuning", tuning_id="tuning-1"))
    assert [store.cancel_job(name) for name in ("waiting", "running", "of-a-tuning")] == [False] * 3
    with pytest.raises(UnknownNameError, match="no-such-job"):
        store.cancel_job("no-such-job")


def test_jobs_that_outlived_their_tuning_are_found(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    store.create_job(job("waiting", tuning_id="tuning-1"))
    granted(store, job("running", tuning_id="tuning-1"))
    assert store.abandoned_tunings() == []
    store.save_tuning(store.tuning("tuning-1").model_copy(update={"state": TuningState.CANCELLED}))
    assert store.abandoned_tunings() == ["tuning-1"]
    store.cancel_jobs("tuning-1")
    assert store.abandoned_tunings() == []


def test_a_cancelled_job_ends_when_its_members_have_reported(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    found = granted(store, job("job-1", tuning_id="tuning-1"))
    store.cancel_jobs("tuning-1")
    after = reported(store, found)
    assert (after.state, after.cancelled) == (JobState.REPORTED, True)
    cancelled = Failure(kind=FailureKind.CANCELLED, message="cancelled")
    end(store, after, FAILED, failure=cancelled)
    assert store.job("job-1").failure is FailureKind.CANCELLED
    assert store.leased_nodes() == {}


def test_gpu_seconds_are_of_the_devices_held_since_then(store: SqlStore) -> None:
    pair(store)
    store.create_job(job("waiting", principal="idle"))
    found = reported(store, granted(store, job("job-1", principal="ada")))
    ended = end(store, found, COLLECTIVE_OUTCOME)
    assert ended is not None
    assert ended.granted_at is not None
    assert ended.ended_at is not None
    held_s = (ended.ended_at - ended.granted_at).total_seconds()
    assert store.gpu_s_by_principal(MOMENT) == {"ada": pytest.approx(8 * held_s)}
    assert store.gpu_s_by_principal(ended.ended_at) == {}
    running = granted(store, job("job-2", principal="bob"))
    assert running.granted_at is not None
    low_s = (store.now() - running.granted_at).total_seconds()
    used = store.gpu_s_by_principal(ended.ended_at)
    high_s = (store.now() - running.granted_at).total_seconds()
    assert list(used) == ["bob"]
    assert 8 * low_s <= used["bob"] <= 8 * high_s


def test_a_local_tuning_has_no_jobs_to_cancel(store: SqlStore) -> None:
    store.create_tuning(tuning(owner=""))
    assert store.cancel_jobs("tuning-1") == []
