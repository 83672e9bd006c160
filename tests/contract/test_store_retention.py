"""What `db compact` deletes of a fleet's past, and what it leaves whatever its age."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from fleet_records import fleet_tuning, granted, job, live_tuning, node, pair, reported, trial_job
from sqlalchemy import select, update
from store_records import CLUSTER, COLLECTIVE_OUTCOME, FINGERPRINT, MODEL, MOMENT, WORKLOAD, step_reading

from autotune.specs import BestEntry, Job, NodeIncident, ProbeOutcome, Trial, TuningState
from storage import SqlStore, open_store
from storage.care.compaction import compact
from storage.care.maintenance import check, stats
from storage.fleet.tables import IdempotencyRow, JobRow, NodeIncidentRow
from storage.tunings.tables import RankCommRow, RankRow, TrialRow

STEP = ProbeOutcome(readings=(step_reading(),), wall_s=2.0, gpu_s=16.0, setup_s=0.5)


def ended(store: SqlStore, new: Job, outcome: ProbeOutcome = COLLECTIVE_OUTCOME) -> Job:
    found = reported(store, granted(store, new))
    done = store.end_job(found.id, found.token, outcome, failure=None, fingerprint_key=FINGERPRINT.key)
    assert done is not None
    return done


def measured(store: SqlStore, name: str) -> Trial:
    """An ended trial of a tuning of that name."""
    first = live_tuning(store, name)
    new = trial_job(f"job-{name}", first)
    store.start_trial(first)
    ended(store, new, STEP)
    return store.trials(name)[0]


def set_all(store: SqlStore, column: Any, moment: datetime) -> None:
    with store.writing() as session:
        session.execute(update(column.class_).values({column: moment}))


def count(store: SqlStore, table: Any) -> int:
    with store.reading() as session:
        return len(session.scalars(select(table)).all())


@pytest.fixture
def now(store: SqlStore) -> datetime:
    return store.now()


def test_reports_of_ended_jobs_go_and_how_they_ended_stays(url: str, store: SqlStore, now: datetime) -> None:
    pair(store)
    old, young = ended(store, job("old")), ended(store, job("young"))
    running = granted(store, job("running"))
    with store.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == "old").values(ended_at=now - timedelta(days=91)))
    old = store.job("old")
    assert compact(url, now=now).reports == 2
    after = store.job("old")
    assert [member.report for member in after.members] == [None, None]
    assert after.model_copy(update={"members": ()}) == old.model_copy(update={"members": ()})
    assert [member.state for member in after.members] == [member.state for member in old.members]
    assert (store.job("young"), store.job("running")) == (young, running)
    assert compact(url, now=now).reports == 0
    assert check(url).sound


def test_what_ranks_saw_goes_but_for_the_trials_of_best_known_plans(url: str, store: SqlStore, now: datetime) -> None:
    pair(store)
    known, other = measured(store, "known"), measured(store, "other")
    entry = BestEntry(
        model=MODEL, parameters=1e6, cluster=CLUSTER, workload=WORKLOAD, plan=known.plan, tokens_per_s_per_gpu=1 / 3,
        interval=(0.3, 0.36), repeats=1, peak_bytes=None, memory_source="", runner_up=None, tuning_id="known",
        fingerprint_key="f", environment_key="e", measured_at=MOMENT,
    )  # fmt: skip
    store.put_best(entry)
    set_all(store, TrialRow.finished_at, now - timedelta(days=89))
    assert compact(url, now=now).ranks == 0
    set_all(store, TrialRow.finished_at, now - timedelta(days=91))
    assert compact(url, now=now).ranks == len(step_reading().ranks)
    assert known.reading is not None
    assert other.reading is not None
    (kept,), (left,) = store.trials("known"), store.trials("other")
    assert kept.reading is not None
    assert kept.reading.ranks == known.reading.ranks
    nothing = {"ranks": (), "step_times_s": (), "warmup_times_s": (), "losses": ()}
    assert left.reading == other.reading.model_copy(update=nothing)
    assert (count(store, RankRow), count(store, RankCommRow)) == (2, 4)
    assert check(url).sound


def test_old_incidents_go_but_for_each_nodes_newest(url: str, store: SqlStore, now: datetime) -> None:
    pair(store)
    store.register_node(node("calm"))
    for name, days in (("a", 100), ("a", 95), ("b", 100), ("b", 5)):
        store.record_incident(NodeIncident(node=name, at=now - timedelta(days=days), kind="hang", message=f"{days}"))
    assert compact(url, now=now).incidents == 2
    assert [(each.node, each.message) for each in store.incidents()] == [("b", "5"), ("a", "95")]


def test_keys_of_requests_go_once_their_tuning_has_ended(url: str, store: SqlStore, now: datetime) -> None:
    for name in ("ended", "live"):
        store.submit_tuning(fleet_tuning(name), sharing_key=name, request_digest="d", idempotency_key=name)
    store.save_tuning(store.tuning("ended").model_copy(update={"state": TuningState.DONE}))
    set_all(store, IdempotencyRow.created_at, now - timedelta(days=91))
    assert compact(url, now=now).keys == 1
    with store.reading() as session:
        assert session.scalars(select(IdempotencyRow.key)).all() == ["live"]


def test_what_may_be_asked_for_again_stays_for_a_day(url: str, store: SqlStore, now: datetime) -> None:
    pair(store)
    ended(store, job("today"))
    store.submit_tuning(fleet_tuning("today"), sharing_key="s", request_digest="d", idempotency_key="k")
    store.save_tuning(store.tuning("today").model_copy(update={"state": TuningState.DONE}))
    done = compact(url, age=timedelta(0), now=now)
    assert (done.reports, done.keys) == (0, 0)
    done = compact(url, age=timedelta(0), now=now + timedelta(days=2))
    assert (done.reports, done.keys) == (2, 1)


def test_many_are_compacted_piece_by_piece(
    url: str, store: SqlStore, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.care.retention.AT_ONCE", 2)
    pair(store)
    for number in range(5):
        ended(store, job(f"job-{number}"))
    set_all(store, JobRow.ended_at, now - timedelta(days=91))
    rows = stats(url).rows
    assert compact(url, now=now).reports == 10
    assert stats(url).rows == rows
    with open_store(url, read_only=True) as again:
        assert all(member.report is None for each in again.jobs() for member in each.members)
    assert count(store, NodeIncidentRow) == 0
