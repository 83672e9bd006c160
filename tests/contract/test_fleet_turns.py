"""Whose turn it is: requests begin, and tunings are advanced, by principal; what fails in the same way is counted."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from fleet_records import LONG_S, POOL, fleet_tuning, granted, job, pair, reported
from processes import Begin, run_together
from store_records import COLLECTIVE_OUTCOME, FINGERPRINT, MOMENT

from autotune.errors import UnknownNameError
from autotune.specs import EventKind, TuningState
from storage import SqlStore, open_store


def ask(store: SqlStore, name: str, principal: str, *, after_s: float = 0.0, key: str = "", pool: str = POOL) -> None:
    asked = fleet_tuning(name, principal, created_at=MOMENT + timedelta(seconds=after_s))
    store.submit_tuning(asked.model_copy(update={"pool": pool}), sharing_key=key or name)


def begin(store: SqlStore, name: str, principal: str) -> None:
    ask(store, name, principal)
    assert name in store.admit_tunings(100)


def claim_and_release(store: SqlStore, name: str) -> None:
    assert store.claim_tuning(name, "tuner", lease_s=LONG_S) is not None
    store.release_tuning(name, "tuner")
    moment = store.now()
    while store.now() <= moment:  # SQLite's clock counts milliseconds
        pass


def end_a_job(store: SqlStore, job_id: str, tuning_id: str) -> None:
    found = reported(store, granted(store, job(job_id, tuning_id=tuning_id)))
    store.end_job(job_id, found.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key)


def test_only_so_many_of_a_principal_begin_and_the_oldest_first(store: SqlStore) -> None:
    for number in range(5):
        ask(store, f"ada-{number}", "ada", after_s=-number)
    ask(store, "bobs", "bob", after_s=9)
    assert list(store.admit_tunings(2)) == ["ada-4", "bobs", "ada-3"]
    assert store.admit_tunings(2) == []
    states = Counter(store.tuning(f"ada-{number}").state for number in range(5))
    assert states == {TuningState.PROFILING: 2, TuningState.QUEUED: 3}
    assert [event.data["state"] for event in store.events("bobs")] == ["queued", "profiling"]
    assert store.end_tuning("ada-4", TuningState.CANCELLED, "enough") == POOL
    assert list(store.admit_tunings(2)) == ["ada-2"]


def test_each_pool_has_a_line_of_its_own(store: SqlStore) -> None:
    for name, pool in (("here-1", "here"), ("here-2", "here"), ("there-1", "there")):
        ask(store, name, "ada", pool=pool)
    assert set(store.admit_tunings(1)) == {"here-1", "there-1"}
    assert store.queue_places(["here-1", "here-2", "there-1"]) == {"here-2": 1}


def test_whoever_joins_the_last_one_of_a_long_line_need_not_wait_for_the_others(store: SqlStore) -> None:
    for number in range(5):
        ask(store, f"ada-{number}", "ada", after_s=number, key=f"k{number}")
    store.admit_tunings(1)
    assert store.queue_places(["ada-0", "ada-1", "ada-4", "no-tuning"]) == {"ada-1": 1, "ada-4": 4}
    assert store.submit_tuning(fleet_tuning("bobs", "bob"), sharing_key="k4")[0].id == "ada-4"
    assert store.queue_places(["ada-3", "ada-4"]) == {"ada-3": 3, "ada-4": 1}
    assert list(store.admit_tunings(1)) == ["ada-4"]
    assert store.admit_tunings(1) == []


def admit(url: str, number: int, begin: Begin) -> list[str]:
    with open_store(url) as store:
        begin()
        return list(store.admit_tunings(3))


@pytest.mark.parametrize("processes", [4])
def test_however_many_tuners_begin_requests_no_more_than_allowed_begin(url: str, processes: int) -> None:
    with open_store(url) as store:
        for number in range(12):
            ask(store, f"t-{number:02}", ("ada", "bob")[number % 2], after_s=number)
    found = run_together(admit, url, processes)
    assert sorted(each for one in found for each in one) == [f"t-{number:02}" for number in range(6)]


def test_principals_take_turns_at_the_tuners(store: SqlStore) -> None:
    pair(store)
    for name, principal in (("ada-1", "ada"), ("ada-2", "ada"), ("ada-3", "ada")):
        begin(store, name, principal)
    claim_and_release(store, "ada-1")
    begin(store, "bobs", "bob")
    assert store.next_turn("ada-2") == "bobs"  # ada had a turn, bob none
    claim_and_release(store, "bobs")
    assert store.next_turn("ada-2") == "ada-2"
    claim_and_release(store, "ada-2")
    end_a_job(store, "job-1", "bobs")
    assert store.next_turn("ada-3") == "bobs"  # there is news of it, and ada had the last turn
    claim_and_release(store, "bobs")
    assert store.next_turn("ada-3") == "ada-3"
    assert store.claim_tuning("ada-3", "tuner", lease_s=LONG_S) is not None
    assert store.next_turn("ada-3") is None  # somebody is at it
    assert store.next_turn("bobs") == "bobs"  # nothing runs for it


def test_a_shared_tuning_may_take_the_turn_of_any_who_wants_it(store: SqlStore) -> None:
    begin(store, "ada-1", "ada")
    begin(store, "ada-2", "ada")
    begin(store, "cleos", "cleo")
    store.submit_tuning(fleet_tuning("bobs", "bob"), sharing_key="ada-2")
    claim_and_release(store, "cleos")
    claim_and_release(store, "ada-1")
    end = store.next_turn("cleos")
    assert end == "ada-2"  # bob had no turn yet


def test_a_tuning_that_waits_for_nodes_takes_nobodys_turn(store: SqlStore) -> None:
    begin(store, "bobs", "bob")
    claim_and_release(store, "bobs")  # it got no job: no node is there
    begin(store, "ada-1", "ada")
    begin(store, "ada-2", "ada")
    claim_and_release(store, "ada-1")
    assert store.next_turn("ada-2") == "ada-2"
    assert store.next_turn("bobs") in {"bobs", "ada-2"}


def test_without_anything_to_be_done_nobody_is_next(store: SqlStore) -> None:
    pair(store)
    begin(store, "runs", "bob")
    store.create_job(job("job-1", tuning_id="runs"))
    claim_and_release(store, "runs")
    assert store.next_turn("runs") is None  # its job is under way
    ask(store, "queued", "ada")
    assert store.next_turn("queued") is None
    assert store.next_turn("no-tuning") is None


def test_what_fails_in_the_same_way_is_counted_until_it_goes_well(store: SqlStore) -> None:
    begin(store, "ada-1", "ada")
    assert [store.note_fault("ada-1", fault) for fault in ("a", "a", "b", "a", "a")] == [1, 2, 1, 1, 2]
    assert store.claim_tuning("ada-1", "tuner", lease_s=LONG_S) is not None
    store.release_tuning("ada-1", "tuner", failed=True)
    assert store.note_fault("ada-1", "a") == 3
    claim_and_release(store, "ada-1")
    assert store.note_fault("ada-1", "a") == 1
    with pytest.raises(UnknownNameError, match="no-tuning"):
        store.note_fault("no-tuning", "a")


@pytest.mark.parametrize(
    ("state", "message"), [(TuningState.FAILED, "the reason"), (TuningState.CANCELLED, "")], ids=str
)
def test_a_tuning_is_ended_whoever_claims_it(store: SqlStore, state: TuningState, message: str) -> None:
    begin(store, "ada-1", "ada")
    assert store.claim_tuning("ada-1", "tuner", lease_s=LONG_S) is not None
    store.end_tuning("ada-1", state, "the reason")
    store.end_tuning("ada-1", TuningState.DONE, "too late")
    ended = store.tuning("ada-1")
    assert (ended.state, ended.stop_reason, ended.message, ended.owner) == (state, "the reason", message, "")
    last = store.events("ada-1")[-1]
    assert (last.kind, last.data["state"], last.data["stop_reason"]) == (EventKind.STATE, state.value, "the reason")
