"""The rules of FleetStore about requests: shared, claimed, withdrawn, due, and told event by event."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fleet_records import LONG_S, OVER_S, fleet_tuning, granted, job, live_tuning, pair, reported
from store_records import COLLECTIVE_OUTCOME, FAILURE, FINGERPRINT, MOMENT, step_reading, trial, tuning

from autotune.errors import InputError, StoreConflictError, UnknownNameError
from autotune.ports.fleet import Submission
from autotune.specs import EventKind, Tuning, TuningState
from storage import SqlStore

ENDS = [state for state in TuningState if state.ended]


def submit(store: SqlStore, new: Tuning, **changes: str) -> tuple[str, bool]:
    found, created = store.submit_tuning(new, **({"sharing_key": "same"} | changes))
    return found.id, created


def set_state(store: SqlStore, tuning_id: str, state: TuningState) -> None:
    store.save_tuning(store.tuning(tuning_id).model_copy(update={"state": state}))


def test_a_submitted_tuning_comes_back_equal(store: SqlStore) -> None:
    new = fleet_tuning()
    assert store.submit_tuning(new, sharing_key="k") == (new, True)
    assert store.tuning("tuning-1") == new
    with pytest.raises(StoreConflictError, match="tuning-1"):
        store.submit_tuning(new, sharing_key="another")


def test_equal_requests_share_a_tuning_while_it_lives(store: SqlStore) -> None:
    assert submit(store, fleet_tuning("first")) == ("first", True)
    assert submit(store, fleet_tuning("second", "bob")) == ("first", False)
    assert submit(store, fleet_tuning("other"), sharing_key="another") == ("other", True)
    assert [each.id for each in store.tunings_page(limit=9)] == ["other", "first"]
    assert store.tuning("first").principal == "ada"


def test_requests_that_came_together_get_what_they_would_have_got_in_turn(store: SqlStore) -> None:
    submit(store, fleet_tuning("lives"), sharing_key="lives", idempotency_key="used", request_digest="d")
    asked = [
        Submission(tuning=fleet_tuning("first", "ada"), sharing_key="k", idempotency_key="i", request_digest="k"),
        Submission(tuning=fleet_tuning("second", "bob"), sharing_key="k"),
        Submission(tuning=fleet_tuning("other"), sharing_key="another"),
        Submission(tuning=fleet_tuning("joins", "bob"), sharing_key="lives"),
        Submission(tuning=fleet_tuning("again", "ada"), sharing_key="another", idempotency_key="i", request_digest="k"),
        Submission(tuning=fleet_tuning("wrong", "ada"), sharing_key="k", idempotency_key="used", request_digest="e"),
        Submission(tuning=fleet_tuning("lives"), sharing_key="a key of its own"),
    ]
    *found, used, exists = store.submit_tunings(asked)
    shown = [(answer[0].id, answer[1]) for answer in found if not isinstance(answer, StoreConflictError)]
    assert shown == [("first", True), ("first", False), ("other", True), ("lives", False), ("first", False)]
    assert isinstance(used, StoreConflictError)
    assert "used" in str(used)
    assert isinstance(exists, StoreConflictError)
    assert "lives" in str(exists)
    assert {each.id for each in store.tunings_page(limit=9)} == {"lives", "first", "other"}
    assert [event.kind for event in store.events("first")] == [EventKind.STATE]
    assert store.models() == []  # each tuning has its own
    assert [withdrawn(store, "first", who) for who in ("ada", "bob")] == [False, True]
    assert not withdrawn(store, "lives", "ada")


def withdrawn(store: SqlStore, tuning_id: str, who: str, *, force: bool = False) -> bool:
    """Whether it is cancelled now that this one does not want it any more."""
    return store.cancel_tuning(tuning_id, [who], f"by {who}", force=force)[0].state is TuningState.CANCELLED


@pytest.mark.parametrize("end", ENDS)
def test_a_tuning_that_ended_is_not_shared_any_more(store: SqlStore, end: TuningState) -> None:
    submit(store, fleet_tuning("first"))
    set_state(store, "first", end)
    assert submit(store, fleet_tuning("second")) == ("second", True)
    assert submit(store, fleet_tuning("third")) == ("second", False)


def test_an_idempotency_key_gives_the_tuning_of_the_first_time(store: SqlStore) -> None:
    key = {"idempotency_key": "k1", "request_digest": "d1"}
    assert submit(store, fleet_tuning("first"), **key) == ("first", True)
    set_state(store, "first", TuningState.DONE)
    assert submit(store, fleet_tuning("second"), **key) == ("first", False)
    with pytest.raises(StoreConflictError, match="k1"):
        submit(store, fleet_tuning("third"), **(key | {"request_digest": "d2"}))
    assert submit(store, fleet_tuning("bobs", "bob"), **key) == ("bobs", True)
    assert [each.id for each in store.tunings_page(limit=9)] == ["first", "bobs"]


def test_an_idempotency_key_of_a_shared_tuning_leads_to_it(store: SqlStore) -> None:
    submit(store, fleet_tuning("first"))
    assert submit(store, fleet_tuning("second", "bob"), idempotency_key="k") == ("first", False)
    set_state(store, "first", TuningState.FAILED)
    assert submit(store, fleet_tuning("third", "bob"), idempotency_key="k") == ("first", False)


def test_the_last_one_who_withdraws_may_cancel(store: SqlStore) -> None:
    submit(store, fleet_tuning("first"))
    submit(store, fleet_tuning("second", "bob"))
    assert store.askers("first") == ["ada", "bob"]
    assert not withdrawn(store, "first", "ada")
    with pytest.raises(StoreConflictError, match="first is wanted by bob, not by stranger"):
        withdrawn(store, "first", "stranger")
    assert store.askers("first") == ["bob"]
    assert withdrawn(store, "first", "bob")
    # Nobody can join what is cancelled, and it can be asked for again.
    assert submit(store, fleet_tuning("third")) == ("third", True)
    assert withdrawn(store, "first", "bob")
    assert withdrawn(store, "third", "root", force=True)
    with pytest.raises(UnknownNameError, match="no-tuning"):
        withdrawn(store, "no-tuning", "ada")


def test_one_tuner_at_a_time_may_advance(store: SqlStore) -> None:
    store.submit_tuning(fleet_tuning(), sharing_key="k")
    claimed = store.claim_tuning("tuning-1", "one", lease_s=LONG_S)
    assert claimed == fleet_tuning().model_copy(update={"owner": "one"})
    assert store.claim_tuning("tuning-1", "two", lease_s=LONG_S) is None
    assert store.claim_tuning("tuning-1", "one", lease_s=OVER_S) is not None  # renewed, for no time at all
    assert store.claim_tuning("tuning-1", "two", lease_s=LONG_S) is not None
    store.release_tuning("tuning-1", "one")
    assert store.claim_tuning("tuning-1", "one", lease_s=LONG_S) is None
    store.release_tuning("tuning-1", "two")
    assert store.tuning("tuning-1").owner == ""
    assert store.claim_tuning("tuning-1", "one", lease_s=LONG_S) is not None


@pytest.mark.parametrize("end", ENDS)
def test_what_has_ended_stays_ended(store: SqlStore, end: TuningState) -> None:
    store.submit_tuning(fleet_tuning(), sharing_key="k")
    stale = store.claim_tuning("tuning-1", "one", lease_s=LONG_S)
    assert stale is not None
    set_state(store, "tuning-1", end)
    assert store.claim_tuning("tuning-1", "one", lease_s=LONG_S) is None
    with pytest.raises(StoreConflictError, match=end.value):
        store.save_tuning(stale.model_copy(update={"state": TuningState.SEARCHING}), expected_owner="one")
    assert store.tuning("tuning-1").state is end
    assert store.due_tunings() == []


def test_a_local_tuning_is_nothing_for_a_tuner(store: SqlStore) -> None:
    store.create_tuning(tuning(owner=""))
    assert store.claim_tuning("tuning-1", "one", lease_s=LONG_S) is None
    assert store.due_tunings() == []
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.claim_tuning("no-tuning", "one", lease_s=LONG_S)


def test_due_is_what_nobody_advances_and_nothing_runs_for(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    assert store.due_tunings() == []  # claimed
    store.claim_tuning("tuning-1", "tuner", lease_s=OVER_S)
    assert list(store.due_tunings()) == ["tuning-1"]
    store.release_tuning("tuning-1", "tuner")
    assert list(store.due_tunings()) == ["tuning-1"]
    first = granted(store, job("job-1", tuning_id="tuning-1"))
    store.create_job(job("job-2", tuning_id="tuning-1"))
    assert store.due_tunings() == []  # two jobs under way
    found = reported(store, first)
    store.end_job("job-1", found.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key)
    assert list(store.due_tunings()) == ["tuning-1"]  # one of them has ended


def test_due_tunings_take_turns(store: SqlStore) -> None:
    for name in ("first", "second", "third"):
        store.submit_tuning(fleet_tuning(name), sharing_key=name)
    assert store.due_tunings() == []  # none of them has begun
    store.admit_tunings(3)
    for name in ("first", "third"):
        store.claim_tuning(name, "tuner", lease_s=LONG_S)
        store.release_tuning(name, "tuner")
        before = store.now()
        while store.now() <= before:
            pass
    assert list(store.due_tunings()) == ["second", "first", "third"]


def test_a_job_that_ends_during_an_advance_is_not_missed(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    first = granted(store, job("job-1", tuning_id="tuning-1"))
    store.create_job(job("job-2", tuning_id="tuning-1"))
    found = reported(store, first)
    store.end_job("job-1", found.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key)
    store.release_tuning("tuning-1", "tuner")  # may have read the jobs before that end
    assert list(store.due_tunings()) == ["tuning-1"]
    ended_at = store.job("job-1").ended_at
    assert ended_at is not None
    while store.now() <= ended_at:
        pass
    store.claim_tuning("tuning-1", "tuner", lease_s=LONG_S)
    store.claim_tuning("tuning-1", "tuner", lease_s=LONG_S)
    store.release_tuning("tuning-1", "tuner")
    assert store.due_tunings() == []


def test_pages_go_from_new_to_old(store: SqlStore) -> None:
    for number, (principal, day) in enumerate((("ada", 1), ("bob", 2), ("ada", 2), ("ada", 3))):
        new = fleet_tuning(f"t{number}", principal, created_at=MOMENT + timedelta(days=day))
        store.submit_tuning(new, sharing_key=new.id)
    set_state(store, "t0", TuningState.DONE)
    first = store.tunings_page(limit=2)
    assert [each.id for each in first] == ["t3", "t2"]
    assert [each.id for each in store.tunings_page(limit=9, before=first[-1].id)] == ["t1", "t0"]
    assert [each.id for each in store.tunings_page(limit=9, principal="ada", before="t3")] == ["t2", "t0"]
    assert [each.id for each in store.tunings_page(limit=9, state="done")] == ["t0"]
    assert store.tunings_page(limit=9, before="t0") == []
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.tunings_page(limit=9, before="no-tuning")


def test_a_name_that_no_database_can_hold_is_bad_input(store: SqlStore) -> None:
    for ask in (
        lambda: store.events("a\x00b"),
        lambda: withdrawn(store, "a\x00b", "ada"),
        lambda: store.tunings_page(limit=1, before="a\x00b"),
        lambda: store.job("a\x00b"),
        lambda: store.node("a\x00b"),
        lambda: store.revoke_key("a\x00b"),
    ):
        with pytest.raises(InputError):
            ask()


def test_the_log_of_a_local_tuning_tells_all(store: SqlStore) -> None:
    before = store.now()
    store.create_tuning(tuning())
    key = store.put_fingerprint(FINGERPRINT)
    store.save_tuning(tuning(state=TuningState.PROFILING))
    store.save_tuning(tuning(state=TuningState.PROFILING, updated_at=MOMENT + timedelta(days=1)))  # nothing to tell
    request = job("x").request
    store.save_probe(
        tuning_id="tuning-1",
        cluster=tuning().cluster,
        fingerprint_key=key,
        request=request,
        outcome=COLLECTIVE_OUTCOME,
    )
    store.start_trial(trial(0))
    store.start_trial(trial(1))
    for number, (reading, failure) in enumerate(((step_reading(), None), (None, FAILURE))):
        store.finish_trial(
            f"tuning-1-{number}",
            reading=reading,
            failure=failure,
            outcome_gpu_s=4.0,
            setup_s=1.0,
            fingerprint_key=key,
        )
    store.save_tuning(tuning(state=TuningState.PROFILING, message="m"))
    events = store.events("tuning-1")
    assert [event.kind.value for event in events] == [
        "state", "state", "probe_ended", "trial_started", "trial_started", "trial_ended", "trial_ended", "state",
    ]  # fmt: skip
    assert all(before <= event.at <= store.now() for event in events)
    assert events[1].data == {"state": "profiling", "message": "", "stop_reason": "", "gpu_s_spent": 0.0}
    assert (events[2].data["request"]["op"], events[2].data["readings"]) == ("all_reduce", 2)
    assert events[3].data["estimate"]["step_time_s"] == 0.7
    assert events[5].data["plan_key"] == trial(0).plan.key
    assert events[5].data["reading"]["tokens_per_s_per_gpu"] == step_reading().tokens_per_s_per_gpu
    assert (events[6].data["state"], events[6].data["failure"]["kind"]) == ("failed", "oom")
    assert "log_tail" not in events[6].data["failure"]
    assert events[7].data["message"] == "m"


def test_the_log_is_read_on_from_where_one_was(store: SqlStore) -> None:
    pair(store)
    live_tuning(store)
    live_tuning(store, "tuning-2")
    granted(store, job("job-1", tuning_id="tuning-1"))
    events = store.events("tuning-1")
    assert [event.kind for event in events] == [EventKind.STATE, EventKind.STATE, EventKind.JOB_GRANTED]
    assert events[1].id < events[2].id
    assert events[2].data["nodes"] == ["a", "b"]
    assert list(store.events("tuning-1", after=events[1].id)) == [events[2]]
    assert list(store.events("tuning-1", limit=1)) == [events[0]]
    assert store.events("tuning-1", after=events[2].id) == []
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.events("no-tuning")
