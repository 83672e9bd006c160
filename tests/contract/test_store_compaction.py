"""Compaction: old samples become summaries, results and verdicts stay, and what is young is not touched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FAILURE,
    FINGERPRINT,
    MODEL,
    WORKLOAD,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import InputError, StoreError
from autotune.specs import ProbeOutcome, TuningState
from storage import SqlStore, open_store
from storage.care.compaction import compact
from storage.care.maintenance import check, stats
from storage.fleet.tables import EventRow
from storage.tunings.tables import CollectiveSummaryRow, ProbeRow, SampleSummaryRow, TrialRow, TuningRow

NOW = datetime(2026, 11, 1, tzinfo=UTC)
OLD, YOUNG = NOW - timedelta(days=91), NOW - timedelta(days=89)


def fill(store: SqlStore) -> None:
    """Two ended trials, three sweeps of two sizes, a failed probe and events: one half old, one half young."""
    key = store.put_fingerprint(FINGERPRINT)
    for name, speed in (("old", 100.0), ("young", 90.0)):
        store.create_tuning(tuning(name))
        store.start_trial(trial(0, name))
        store.finish_trial(
            f"{name}-0", reading=step_reading(speed), failure=None, outcome_gpu_s=1.0, setup_s=0.0, fingerprint_key=key
        )
        store.save_tuning(store.tuning(name).model_copy(update={"state": TuningState.DONE}))
    store.start_trial(trial(1, "young"))  # still running
    for _ in range(3):
        store.save_probe(
            tuning_id=None, cluster=CLUSTER, fingerprint_key=key, request=COLLECTIVE_REQUEST, outcome=COLLECTIVE_OUTCOME
        )
    outcome = ProbeOutcome(failure=FAILURE, wall_s=1.0, gpu_s=8.0, setup_s=0.0)
    for _ in range(2):
        store.save_probe(
            tuning_id=None, cluster=CLUSTER, fingerprint_key=key, request=COLLECTIVE_REQUEST, outcome=outcome
        )


def age(store: SqlStore) -> None:
    """Moves what is to be old into the past, with two events of each tuning."""
    with store.writing() as session:
        session.execute(text("DELETE FROM tuning_events"))
        for name, moment in (("old", OLD), ("young", YOUNG)):
            session.execute(update(TrialRow).where(TrialRow.id == f"{name}-0").values(finished_at=moment))
            session.execute(update(TuningRow).where(TuningRow.id == name).values(updated_at=moment))
            session.add_all(EventRow(tuning_id=name, kind="state", at=OLD, data_json="{}") for _ in range(2))
        probes = session.scalars(select(ProbeRow).order_by(ProbeRow.finished_at, ProbeRow.id)).all()
        failed = [probe for probe in probes if probe.failure_kind is not None]
        sweeps = [probe for probe in probes if probe.failure_kind is None]
        for probe in (*sweeps, failed[0]):
            probe.finished_at = OLD
        failed[1].finished_at = YOUNG


@pytest.fixture
def filled(url: str) -> str:
    with open_store(url) as store:
        fill(store)
        age(store)
    return url


def rows(url: str, table: Any) -> list[Any]:
    with open_store(url, read_only=True) as store, store.reading() as session:
        return list(session.scalars(select(table)))


def test_old_samples_become_summaries_and_results_stay(filled: str) -> None:
    with open_store(filled, read_only=True) as store:
        before = {name: store.trials(name) for name in ("old", "young")}
        best = [found.id for found in store.best_trials(MODEL, CLUSTER, WORKLOAD)]
    done = compact(filled, kept=2, now=NOW)
    assert (done.samples, done.readings, done.logs, done.events) == (8, 2, 1, 2)
    assert (done.before, done.size_after_bytes > 0) == (NOW - timedelta(days=90), True)
    with open_store(filled, read_only=True) as store:
        assert store.trials("young") == before["young"]
        (old,) = store.trials("old")
        nothing = {"step_times_s": (), "warmup_times_s": (), "losses": (), "ranks": ()}
        assert old == before["old"][0].model_copy(update={"reading": step_reading(100.0).model_copy(update=nothing)})
        assert [found.id for found in store.best_trials(MODEL, CLUSTER, WORKLOAD)] == best
        assert len(store.collective_readings(CLUSTER.key, FINGERPRINT.key)) == 4
    assert check(filled).sound


def test_a_summary_holds_the_series_in_figures(filled: str) -> None:
    compact(filled, now=NOW)
    found = {row.series: row for row in rows(filled, SampleSummaryRow)}
    step, loss = found["step"], found["loss"]
    assert (step.count, step.least, step.median, step.most) == (3, 0.29, 0.3, 0.30000000000000004)
    assert step.mean == pytest.approx(0.2966667)
    assert (loss.first, loss.last, found["warmup"].count) == (11.5, 3.0000000001, 2)


def test_the_newest_readings_of_each_kind_stay_raw(filled: str) -> None:
    compact(filled, kept=1, now=NOW)
    small, large = sorted(rows(filled, CollectiveSummaryRow), key=lambda row: row.size_bytes)
    assert (small.size_bytes, small.count, small.time_s, small.time_least_s) == (1024, 2, 1e-5, 1e-5)
    assert (large.size_bytes, large.count, large.time_most_s) == (2**33, 2, 0.5)
    assert (small.first_at, small.last_at, small.op) == (OLD, OLD, "all_reduce")


def test_compacting_again_changes_nothing(filled: str) -> None:
    compact(filled, kept=1, now=NOW)
    before = stats(filled).rows
    again = compact(filled, kept=1, now=NOW)
    assert (again.samples, again.readings, again.logs, again.events) == (0, 0, 0, 0)
    assert stats(filled).rows == before


def test_what_failed_is_kept_without_its_log(filled: str) -> None:
    compact(filled, now=NOW)
    failed = sorted((row for row in rows(filled, ProbeRow) if row.failure_kind), key=lambda row: row.finished_at)
    assert [(row.failure_kind, row.failure_message, row.failure_log_tail) for row in failed] == [
        ("oom", FAILURE.message, ""),
        ("oom", FAILURE.message, FAILURE.log_tail),
    ]


def test_nothing_young_is_touched(filled: str) -> None:
    before = stats(filled).rows
    done = compact(filled, age=timedelta(days=92), kept=1, now=NOW)
    assert (done.samples, done.readings, done.logs, done.events) == (0, 0, 0, 0)
    assert stats(filled).rows == before


def test_others_write_while_it_runs(filled: str) -> None:
    with open_store(filled) as store:
        compact(filled, now=NOW)
        store.put_model(MODEL)
        assert store.models() == [MODEL]


@pytest.mark.parametrize("wrong", [{"age": timedelta(days=-1)}, {"kept": 0}])
def test_an_age_or_number_that_cannot_be(filled: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="compaction"):
        compact(filled, **wrong)


def test_a_database_that_cannot_be_opened() -> None:
    with pytest.raises(StoreError, match="directory does not exist"):
        compact("sqlite:////nowhere/at/all/a.db")
