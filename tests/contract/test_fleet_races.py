"""Several threads and processes at one fleet: each question has one answer, and nobody waits in a circle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import quote

import psycopg
import pytest
from fleet_records import (
    LONG_S,
    OVER_S,
    fleet_tuning,
    granted,
    job,
    live_tuning,
    node,
    pair,
    report,
    reported,
    trial_job,
)
from processes import Begin, run_together
from services import PASSWORD, PostgresServer
from store_records import COLLECTIVE_OUTCOME, FINGERPRINT, step_reading, trial, tuning

from autotune.errors import StoreError
from autotune.ports.fleet import Submission
from autotune.specs import Job, JobState, MemberState, ProbeOutcome, TuningState
from storage import SqlStore, open_store
from storage.care.maintenance import check
from storage.fleet.jobs import job_row
from storage.fleet.submissions import Intake
from storage.tunings.named import locked_tuning

Answer = TypeVar("Answer")


def submit(url: str, number: int, begin: Begin) -> tuple[str, bool]:
    with open_store(url) as store:
        begin()
        asked = fleet_tuning(f"t{number}", f"p{number % 3}")
        found, created = store.submit_tuning(asked, sharing_key="same", idempotency_key="k")
    return found.id, created


def grant(url: str, number: int, begin: Begin) -> int | None:
    gang = [["a", "b"], ["b", "c"], ["c", "a"]][number % 3]
    with open_store(url) as store:
        begin()
        found = store.grant(f"job-{number}", gang, lease_s=LONG_S, world_id=f"w{number}", warm=False)
    return None if found is None else found.token


def end(url: str, number: int, begin: Begin) -> bool:
    outcome = ProbeOutcome(readings=(step_reading(float(number)),), wall_s=1.0, gpu_s=8.0, setup_s=0.0)
    with open_store(url) as store:
        token = store.job("job-1").token
        begin()
        return store.end_job("job-1", token, outcome, failure=None, fingerprint_key=FINGERPRINT.key) is not None


def together(work: Callable[[int], Answer], count: int) -> list[Answer]:
    """Does it in threads that begin at once; gives what each found. A deadlock is an error."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Answer:
        barrier.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count), timeout=200))


def test_processes_that_ask_for_the_same_share_one_tuning(store: SqlStore, url: str) -> None:
    answers = run_together(submit, url, 8)
    assert len({name for name, _ in answers}) == 1
    assert sorted(created for _, created in answers) == [False] * 7 + [True]
    (only,) = store.tunings_page(limit=9)
    assert len(store.events(only.id)) == 1
    # Three principals share it: it is nobody's any more when the third one withdraws.
    states = [store.cancel_tuning(only.id, [f"p{number}"], "enough")[0].state for number in range(3)]
    assert states == [TuningState.QUEUED, TuningState.QUEUED, TuningState.CANCELLED]


def test_of_processes_that_want_overlapping_gangs_one_gets_its_nodes(store: SqlStore, url: str) -> None:
    for name in ("a", "b", "c"):
        store.register_node(node(name))
    for number in range(1, 5):
        store.create_job(job(f"job-{number}"))
    answers = run_together(grant, url, 4)
    (won,) = store.jobs(states=[JobState.GRANTED])
    assert [token for token in answers if token is not None] == [won.token]
    assert store.leased_nodes() == {member.node: won.id for member in won.members}
    assert len(store.leased_nodes()) == 2
    assert [each.members for each in store.jobs(states=[JobState.QUEUED])] == [()] * 3


def test_of_processes_that_end_a_job_one_does(store: SqlStore, url: str) -> None:
    pair(store)
    first = live_tuning(store)
    store.create_job(trial_job("job-1", first), trial=first)
    found = store.grant("job-1", ["a", "b"], lease_s=LONG_S, world_id="w", warm=False)
    assert found is not None
    reported(store, found)
    answers = run_together(end, url, 2)
    assert sorted(answers) == [False, True]
    (done,) = store.trials("tuning-1")
    assert done.reading == step_reading(1.0 + answers.index(True))
    assert store.tuning("tuning-1").gpu_s_spent == 8.0
    assert store.leased_nodes() == {}


def test_one_tuner_claims(store: SqlStore) -> None:
    store.submit_tuning(fleet_tuning(), sharing_key="k")
    claims = together(lambda number: store.claim_tuning("tuning-1", f"tuner-{number}", lease_s=LONG_S), 6)
    (won,) = [claim for claim in claims if claim is not None]
    assert store.tuning("tuning-1").owner == won.owner


def test_a_tuning_of_a_single_process_is_its_until_it_lets_go(store: SqlStore) -> None:
    store.create_tuning(tuning("own", owner=""))
    claims = together(lambda number: store.claim_tuning("own", f"process-{number}", lease_s=None), 6)
    (won,) = [claim for claim in claims if claim is not None]
    assert store.claim_tuning("own", won.owner, lease_s=None) is not None
    assert store.claim_tuning("own", "tuner", lease_s=LONG_S) is None  # that is not for a fleet
    store.release_tuning("own", won.owner)
    assert store.claim_tuning("own", "another", lease_s=None) is not None


def test_requests_join_a_tuning_while_somebody_works_on_it(postgres: PostgresServer) -> None:
    """Else one tuner that is frozen there would hold up all who ask for anything at that time."""
    with open_store(postgres.url(postgres.create_database())) as store:
        store.submit_tuning(fleet_tuning("wanted", "ada"), sharing_key="k")
        with ThreadPoolExecutor(1) as beside, store.writing() as session:
            locked_tuning(session, "wanted").message = "being advanced"
            session.flush()
            joined = beside.submit(store.submit_tuning, fleet_tuning("again", "bob"), sharing_key="k")
            assert joined.result(timeout=30)[0].id == "wanted"
        assert store.askers("wanted") == ["ada", "bob"]


def test_nobody_joins_what_is_being_withdrawn(postgres: PostgresServer) -> None:
    with open_store(postgres.url(postgres.create_database())) as store:
        store.submit_tuning(fleet_tuning("first", "ada"), sharing_key="k")
        with ThreadPoolExecutor(1) as beside:
            with store.writing() as session:
                locked_tuning(session, "first", joinable=False).sharing_key = None
                joined = beside.submit(store.submit_tuning, fleet_tuning("second", "bob"), sharing_key="k")
                until_somebody_waits(postgres)
            assert joined.result(timeout=30)[0].id == "second"


def test_what_somebody_joins_is_not_withdrawn(postgres: PostgresServer) -> None:
    with open_store(postgres.url(postgres.create_database())) as store:
        store.submit_tuning(fleet_tuning("first", "ada"), sharing_key="k")
        request = Submission(tuning=fleet_tuning("second", "bob"), sharing_key="k")
        with ThreadPoolExecutor(1) as beside:
            with store.writing() as session:
                intake = Intake(session, [request])
                intake.take(request)
                intake.store()
                withdrawn = beside.submit(store.cancel_tuning, "first", ["ada"], "enough")
                until_somebody_waits(postgres)
            assert withdrawn.result(timeout=30)[0].state is TuningState.QUEUED
        assert store.askers("first") == ["bob"]


def until_somebody_waits(postgres: PostgresServer) -> None:
    """For a lock, within 30 s."""
    deadline = time.monotonic() + 30.0
    with psycopg.connect(postgres.url(), autocommit=True) as beside:
        while beside.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_members_that_report_at_once_make_the_job_reported_once(store: SqlStore) -> None:
    names = [f"n{number}" for number in range(6)]
    for name in names:
        store.register_node(node(name))
    found = granted(store, job("job-1"), tuple(names))
    states = together(
        lambda number: store.report_member("job-1", found.token, names[number], "s1", report()), len(names)
    )
    assert [each.state for each in states if each].count(JobState.REPORTED) == 1
    assert store.job("job-1").state is JobState.REPORTED


def test_a_node_has_one_session_however_many_register(store: SqlStore) -> None:
    together(lambda number: store.register_node(node("a", f"s{number}")), 6)
    (only,) = store.nodes()
    assert [store.renew_node("a", f"s{number}") for number in range(6)].count(True) == 1
    assert store.renew_node("a", only.session)


def test_a_cancel_and_a_retry_at_once_leave_nothing_queued(store: SqlStore) -> None:
    pair(store)
    for turn in range(6):
        name = f"tuning-{turn}"
        live_tuning(store, name)
        found = reported(store, granted(store, job(f"job-{turn}", tuning_id=name)))
        retry = job(f"retry-{turn}", tuning_id=name)
        failed = ProbeOutcome(failure=None, wall_s=1.0, gpu_s=8.0, setup_s=0.0)

        def work(
            number: int, name: str = name, found: Job = found, retry: Job = retry, failed: ProbeOutcome = failed
        ) -> None:
            if number:
                store.end_job(found.id, found.token, failed, failure=None, retry=retry)
                return
            store.save_tuning(store.tuning(name).model_copy(update={"state": TuningState.CANCELLED}))
            store.cancel_jobs(name)

        together(work, 2)
    assert {each.state for each in store.jobs()} == {JobState.ENDED}
    assert store.leased_nodes() == {}


def test_the_ids_of_a_log_are_seen_in_their_order(store: SqlStore) -> None:
    """A reader who asks on from the last event that he saw must miss none, however commits interleave."""
    live_tuning(store)
    writing, seen = {1, 2, 3}, [0]

    def work(number: int) -> None:
        if number in writing:
            try:
                for turn in range(12):
                    store.start_trial(trial(number * 100 + turn))
            finally:
                writing.remove(number)
            return
        last = False
        while not last:
            last = not writing
            seen.extend(event.id for event in store.events("tuning-1", after=seen[-1]))

    together(work, 4)
    assert seen[1:] == [event.id for event in store.events("tuning-1")]
    assert len(seen[1:]) == 2 + 36


def test_nobody_waits_in_a_circle_and_no_node_is_held_twice(store: SqlStore, url: str) -> None:
    """Threads that grant, run, lose, evict, blame and end at random; a deadlock would be an error of the database."""
    names = [f"n{number}" for number in range(5)]
    for name in names:
        store.register_node(node(name))
    store.put_fingerprint(FINGERPRINT)
    live_tuning(store)

    def work(number: int) -> None:
        dice = random.Random(number)
        for turn in range(8):
            gang = dice.sample(names, dice.randint(1, 3))
            new = job(f"job-{number}-{turn}", tuning_id="tuning-1")
            store.create_job(new)
            found = store.grant(new.id, gang, lease_s=LONG_S, world_id=new.id, warm=False)
            if found is None:
                continue
            for name in gang:
                session = store.node(name).session
                store.start_member(new.id, found.token, name, session, lease_s=LONG_S)
                if dice.random() < 0.2:
                    store.register_node(node(dice.choice(names), f"s{number}-{turn}"))
                lease_s = OVER_S if dice.random() < 0.2 else LONG_S
                if store.renew_member(new.id, found.token, name, session, lease_s=lease_s).go_on:
                    store.report_member(new.id, found.token, name, session, report())
            store.expire_members()
            store.clear_blame(gang)
            finish(store, new.id, gang)

    def finish(store: SqlStore, job_id: str, gang: list[str]) -> None:
        found = store.job(job_id)
        for member in found.members:
            if member.state in {MemberState.LEASED, MemberState.RUNNING}:
                store.register_node(node(member.node, f"evicts-{job_id}"))
        held = store.leased_nodes()
        assert {name for name in gang if held.get(name) == job_id} == set(gang)
        ended = store.end_job(
            job_id, found.token, COLLECTIVE_OUTCOME, failure=None, fingerprint_key=FINGERPRINT.key, warm_nodes=gang
        )
        assert ended is not None

    together(work, 5)
    assert store.leased_nodes() == {}
    ended = store.jobs(states=[JobState.ENDED])
    tokens = [each.token for each in ended]
    assert len(set(tokens)) == len(tokens) > 0
    assert store.tuning("tuning-1").gpu_s_spent == 16.0 * len(ended)
    assert check(url).sound


def test_a_connection_lost_in_mid_transaction_is_an_error_and_writes_nothing(postgres: PostgresServer) -> None:
    name = postgres.create_database()
    others = f"datname = '{name}' AND pid <> pg_backend_pid()"
    cut = f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}"  # and waits for that

    def write_and_lose(store: SqlStore) -> None:
        with store.writing() as session:
            session.add(job_row(job("job-2")))
            session.flush()
            postgres.execute(cut)

    with open_store(postgres.url(name)) as store:
        pair(store)
        store.create_job(job("job-1"))
        with pytest.raises(StoreError, match=name) as caught:
            write_and_lose(store)
        assert PASSWORD not in str(caught.value)
        assert [each.id for each in store.jobs()] == ["job-1"]
        postgres.execute(cut)  # while the store is idle: it finds the dead connection and takes a new one
        assert granted(store, job("job-3")).state is JobState.GRANTED


def test_a_process_frozen_between_two_rows_keeps_no_lock(postgres: PostgresServer) -> None:
    name = postgres.create_database()
    held = f"SELECT 1 FROM pg_locks JOIN pg_database d ON d.oid = database AND datname = '{name}'"

    def rows() -> Iterator[tuple[str, str]]:
        """The second one is not sent before the server has given its sender up, or for 20 s."""
        yield "first", "a"
        deadline = time.monotonic() + 20.0
        with psycopg.connect(postgres.url(), autocommit=True) as beside:
            while beside.execute(held).fetchone() and time.monotonic() < deadline:  # type: ignore[call-overload]
                time.sleep(0.02)
        yield "second", "b"

    def write_rows(store: SqlStore) -> None:
        with store.writing() as session:
            cursor = session.connection().connection.cursor()
            cursor.executemany("UPDATE nodes SET reason = %s WHERE name = %s", rows())

    with open_store(postgres.url(name)) as store:
        store.register_node(node("a"))
        store.register_node(node("b"))
    options = quote("-c idle_in_transaction_session_timeout=500")
    with open_store(f"{postgres.url(name)}?options={options}") as store:
        with pytest.raises(StoreError, match=name):
            write_rows(store)
        assert [each.reason for each in store.nodes()] == ["", ""]
