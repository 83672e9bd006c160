"""Several processes at one database: each question has one answer, and a killed one leaves no half answer."""

from __future__ import annotations

import signal
import sqlite3
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from processes import CONTEXT, Begin, run_together
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import event
from store_records import CLUSTER, FAILURE, FINGERPRINT, MODEL, step_reading, trial, tuning

from autotune.errors import StoreConflictError
from autotune.specs import TrialState
from storage import SqlStore, open_store
from storage.care.maintenance import check, stats
from storage.tunings.rows import tuning_values
from storage.tunings.tables import TuningRow


def open_fresh(url: str, number: int, begin: Begin) -> None:
    begin()
    with open_store(url) as store:
        store.put_model(MODEL)


def finish(url: str, number: int, begin: Begin) -> bool:
    """Whether this one finished the trial."""
    with open_store(url) as store:
        begin()
        try:
            store.finish_trial(
                "tuning-1-0", reading=step_reading(float(number)), failure=None, outcome_gpu_s=10.0, setup_s=0.0,
                fingerprint_key=FINGERPRINT.key,
            )  # fmt: skip
        except StoreConflictError:
            return False
    return True


def half_a_transaction(url: str, ready: Connection) -> None:
    with open_store(url) as store, store.writing() as session:
        session.get_one(TuningRow, "tuning-1").gpu_s_spent = 1e9
        # More than SQLite's page cache, so that pages of the open transaction reach the log before the end.
        for number in range(400):
            session.add(TuningRow(**tuning_values(tuning(f"half-{number}", message="m" * 50_000))))
        session.flush()
        ready.send("ready")
        signal.pause()


def test_processes_that_open_a_fresh_database_at_once_all_succeed(empty_url: str) -> None:
    run_together(open_fresh, empty_url, 4)
    with open_store(empty_url, read_only=True) as store:
        assert list(store.models()) == [MODEL]
    assert check(empty_url).sound


def test_of_two_processes_that_finish_a_trial_exactly_one_wins(store: SqlStore, url: str) -> None:
    store.create_tuning(tuning())
    store.put_fingerprint(FINGERPRINT)
    store.start_trial(trial(0))
    ends = run_together(finish, url, 2)
    assert sorted(ends) == [False, True]
    (ended,) = store.trials("tuning-1")
    assert ended.reading == step_reading(1.0 + ends.index(True))
    assert store.tuning("tuning-1").gpu_s_spent == 10.0


def test_threads_may_share_a_store_and_no_gpu_second_is_lost(store: SqlStore) -> None:
    store.create_tuning(tuning())
    store.put_fingerprint(FINGERPRINT)
    conflicts = []

    def work() -> None:
        for number in range(10):
            try:
                store.start_trial(trial(number))
                store.finish_trial(
                    f"tuning-1-{number}",
                    reading=None,
                    failure=FAILURE,
                    outcome_gpu_s=1.0,
                    setup_s=0.0,
                    fingerprint_key=FINGERPRINT.key,
                )
            except StoreConflictError as error:
                conflicts.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert store.tuning("tuning-1").gpu_s_spent == 10.0
    assert len(store.trials("tuning-1")) == 10
    assert len(conflicts) == 30


def test_one_owner_takes_a_tuning(store: SqlStore) -> None:
    store.create_tuning(tuning(owner=""))
    outcomes: list[str] = []

    def take(owner: str) -> None:
        try:
            store.save_tuning(tuning(owner=owner), expected_owner="")
            outcomes.append(owner)
        except StoreConflictError:
            pass

    threads = [threading.Thread(target=take, args=(f"owner-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcomes == [store.tuning("tuning-1").owner]


def test_kill_9_in_mid_transaction_leaves_the_state_before_it(store: SqlStore, url: str) -> None:
    store.create_tuning(tuning())
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=half_a_transaction, args=(url, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    process.kill()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    with open_store(url) as after:
        assert list(after.tunings()) == [tuning()]
        after.put_cluster(CLUSTER)
    assert check(url).sound
    assert stats(url).rows["tunings"] == 1


def test_trials_are_read_as_one_moment_left_them(store: SqlStore, url: str) -> None:
    """A trial that ends between two statements is running without a reading, or complete with one."""
    store.create_tuning(tuning())
    store.start_trial(trial(0))
    key, sent = store.put_fingerprint(FINGERPRINT), []

    with open_store(url) as other, store.reading() as session:

        def end(_connection: SqlConnection, _cursor: object, statement: str, *_rest: object) -> None:
            if "FROM tuning_trials" in statement and not sent:
                sent.append(statement)
                other.finish_trial(
                    "tuning-1-0", reading=step_reading(), failure=None, outcome_gpu_s=1.0, setup_s=0.0,
                    fingerprint_key=key,
                )  # fmt: skip

        event.listen(session.get_bind(), "after_cursor_execute", end)
        (during,) = store.trials("tuning-1")
        (after,) = store.trials("tuning-1")
    assert sent
    assert during == trial(0)
    assert (after.state, after.reading) == (TrialState.COMPLETE, step_reading())


def test_a_reader_is_not_blocked_by_a_writer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    with open_store(url) as writing, open_store(url, read_only=True) as reading:
        writing.put_model(MODEL)
        blocker = sqlite3.connect(tmp_path / "autotune.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        blocker.execute("DELETE FROM models")
        assert list(reading.models()) == [MODEL]
        blocker.execute("ROLLBACK")
        blocker.close()


def test_commits_survive_loss_of_power(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store, store.reading() as session:
        connection = session.connection()
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
