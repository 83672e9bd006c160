"""What a store keeps of regression checks, incidents and alerts, over SQLite and PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from store_records import CLUSTER, FINGERPRINT, MODEL, MOMENT, WORKLOAD, tuning

from autotune.errors import UnknownNameError
from autotune.specs import BestEntry, FailureKind, Plan
from autotune.specs.regression import (
    AlertChannel,
    AlertEvent,
    Attribution,
    CauseKind,
    Check,
    CheckMeasurement,
    CheckResult,
    CheckRole,
    CheckState,
    CheckWindow,
    RankTrace,
    StepTrace,
    VerdictKind,
    series_of,
)
from storage import SqlStore

BOTH = (AlertChannel.WEBHOOK, AlertChannel.EMAIL)
TRACE = StepTrace(
    step_s=0.3, calc_s=0.2, comm_s=0.1, exposed_s=0.05, ranks=(RankTrace(rank=0, hostname="a\x00b", calc_s=0.2),)
)


def entry(**changes: object) -> BestEntry:
    made = BestEntry(
        model=MODEL, parameters=1e6, cluster=CLUSTER, workload=WORKLOAD, plan=Plan(tp=2, dp=4),
        tokens_per_s_per_gpu=100.0, interval=(90.0, 110.0), repeats=3, peak_bytes=2**33, tuning_id="t",
        fingerprint_key=FINGERPRINT.key, environment_key="e", measured_at=MOMENT,
    )  # fmt: skip
    return made.model_copy(update=changes)


def check_of(of: BestEntry, check_id: str = "c1", **changes: object) -> Check:
    made = Check(
        id=check_id, entry_id=of.id, series=series_of(of), cluster_key=of.cluster.key, environment_key="e",
        owner="me", budget_gpu_s=60.0, started_at=MOMENT,
    )  # fmt: skip
    return made.model_copy(update=changes)


def measurement(number: int, **changes: object) -> CheckMeasurement:
    made = CheckMeasurement(
        number=number, window=0, role=CheckRole.WINNER, at=MOMENT, gpu_s=1.5, speed=1 / 3, trace=TRACE, peak_bytes=2**40
    )
    return made.model_copy(update=changes)


def result(kind: VerdictKind, **changes: object) -> CheckResult:
    cause = Attribution(kind=CauseKind.LINK_ACROSS, subject="link ib", text="half as fast")
    window = CheckWindow(at=MOMENT, speeds={CheckRole.WINNER: (1.0, 2.0)}, trace=TRACE)
    made = CheckResult(
        verdict=kind, effect=-0.1, interval=(-0.2, -0.05), windows=(window,), message="throughput -10 %",
        cause=cause if kind is VerdictKind.WORSE else None,
    )  # fmt: skip
    return made.model_copy(update=changes)


def ended(store: SqlStore, of: BestEntry, check_id: str, kind: VerdictKind, key: str = "link") -> None:
    assert store.create_check(check_of(of, check_id))
    assert store.end_check(check_id, result(kind), key=key, channels=BOTH) is not None


def test_a_check_and_its_measurements_come_back_as_they_were_put(store: SqlStore) -> None:
    known = store.put_best(entry())
    assert store.create_check(check_of(known))
    failed = measurement(1, speed=None, trace=None, failure=FailureKind.HANG, message="rank 1 \x00 hung")
    assert store.add_measurement("c1", measurement(0))
    assert store.add_measurement("c1", failed)
    assert store.measurements("c1")[0] == measurement(0)
    assert store.measurements("c1")[1].failure is FailureKind.HANG
    done = store.end_check("c1", result(VerdictKind.UNCHANGED))
    assert done is not None
    assert done.result == result(VerdictKind.UNCHANGED)
    assert (done.gpu_s, done.state, done.ended_at is not None) == (3.0, CheckState.DONE, True)
    assert store.check("c1") == done
    assert store.checks(series=series_of(known), cluster_key=CLUSTER.key, state=CheckState.DONE) == [done]
    with pytest.raises(UnknownNameError, match="nobody"):
        store.check("nobody")


def test_a_measurement_and_an_end_count_once(store: SqlStore) -> None:
    store.create_check(check_of(store.put_best(entry())))
    assert store.add_measurement("c1", measurement(0))
    assert not store.add_measurement("c1", measurement(0, speed=9.0))
    assert store.check("c1").gpu_s == 1.5
    assert store.end_check("c1", result(VerdictKind.UNCHANGED)) is not None
    assert store.end_check("c1", result(VerdictKind.WORSE), key="k", channels=BOTH) is None
    assert not store.add_measurement("c1", measurement(1))
    assert not store.abandon_check("c1")
    assert store.incidents_page() == []


def test_one_check_of_a_plan_runs_at_a_time_and_one_owner_measures(store: SqlStore) -> None:
    known = store.put_best(entry())
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: store.create_check(check_of(known, f"c{i}")), range(4)))
    assert sum(made) == 1
    (check,) = store.checks(state=CheckState.RUNNING)
    assert not store.claim_check(check.id, "you", expected_owner="somebody")
    assert store.claim_check(check.id, "you", expected_owner="me")
    assert store.abandon_check(check.id)
    assert store.create_check(check_of(known, "later"))


def test_an_incident_is_told_once_and_once_more_when_it_has_recovered(store: SqlStore) -> None:
    known = store.put_best(entry())
    for number, kind in enumerate((VerdictKind.WORSE, VerdictKind.WORSE, VerdictKind.CANNOT_TELL)):
        ended(store, known, f"c{number}", kind, key=f"key-{number}")
    (incident,) = store.incidents_page(open_only=True)
    assert (incident.kind, incident.subject, incident.check_id) == (CauseKind.LINK_ACROSS, "link ib", "c0")
    assert incident.series == (series_of(known),)
    ended(store, known, "good", VerdictKind.UNCHANGED)
    ended(store, known, "again", VerdictKind.UNCHANGED)
    assert store.incidents_page(open_only=True) == []
    (incident,) = store.incidents_page()
    assert incident.recovered_at is not None
    assert incident.entries == (known.id,)
    alerts = store.due_alerts(incident.recovered_at)
    assert sorted((alert.event, alert.channel) for alert in alerts) == sorted(
        (event, channel) for event in AlertEvent for channel in BOTH
    )
    ended(store, known, "worse-again", VerdictKind.WORSE)
    assert len(store.incidents_page()) == 2


def test_plans_with_one_cause_share_an_incident_until_all_have_recovered(store: SqlStore) -> None:
    one = store.put_best(entry())
    other = store.put_best(entry(workload=WORKLOAD.model_copy(update={"seq_len": 256})))
    ended(store, one, "c1", VerdictKind.WORSE)
    ended(store, other, "c2", VerdictKind.WORSE)
    (incident,) = store.incidents_page(open_only=True)
    assert incident.entries == (one.id, other.id)
    ended(store, one, "c3", VerdictKind.BETTER)
    (incident,) = store.incidents_page(open_only=True)
    assert incident.series == (series_of(other),)
    ended(store, other, "c4", VerdictKind.UNCHANGED)
    assert store.incidents_page(open_only=True) == []


def test_checks_that_end_at_once_open_one_incident(store: SqlStore) -> None:
    known = [store.put_best(entry(workload=WORKLOAD.model_copy(update={"seq_len": 64 * i}))) for i in range(1, 5)]
    for number, each in enumerate(known):
        assert store.create_check(check_of(each, f"c{number}"))
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda number: store.end_check(f"c{number}", result(VerdictKind.WORSE), key="link", channels=BOTH),
                range(4),
            )
        )
    (incident,) = store.incidents_page()
    assert len(incident.series) == 4
    assert len(store.due_alerts(incident.opened_at)) == 2


def test_an_alert_is_sent_by_one_and_tried_again_later(store: SqlStore) -> None:
    ended(store, store.put_best(entry()), "c1", VerdictKind.WORSE)
    now = store.now()
    first, second = store.due_alerts(now)
    assert store.claim_alert(first.key, now, timedelta(minutes=1))
    assert not store.claim_alert(first.key, now, timedelta(minutes=1))
    store.note_alert(first.key, sent_at=None, due_at=now + timedelta(hours=1), error="refused")
    store.claim_alert(second.key, now, timedelta(minutes=1))
    store.note_alert(second.key, sent_at=now, due_at=now, error="")
    assert store.due_alerts(now) == []
    (later,) = store.due_alerts(now + timedelta(hours=2))
    assert (later.key, later.attempts, later.error) == (first.key, 1, "refused")


def test_candidates_are_the_current_plans_of_our_own_with_their_last_check(store: SqlStore) -> None:
    store.create_tuning(tuning())
    old = store.put_best(entry())
    store.put_best(entry(source="a paper", tuning_id=None))
    (candidate,) = store.check_candidates()
    assert (candidate.entry_id, candidate.tuned, candidate.checked_at) == (old.id, 1, None)
    assert candidate.step_s == pytest.approx(WORKLOAD.tokens_per_step / (100.0 * 8))
    ended(store, old, "c1", VerdictKind.WORSE)
    (candidate,) = store.check_candidates()
    assert candidate.open_incident
    assert candidate.checked_at == MOMENT
    upgraded = store.put_best(
        entry(environment_key="e2", plan=Plan(dp=8), measured_at=MOMENT + timedelta(days=1), tokens_per_s_per_gpu=1.0)
    )
    found = store.check_candidates()
    assert [item.entry_id for item in found] == [upgraded.id, old.id]  # the replaced one has not recovered yet
    assert not found[0].open_incident
    ended(store, old, "c2", VerdictKind.UNCHANGED)
    assert [item.entry_id for item in store.check_candidates()] == [upgraded.id]


def test_a_check_has_one_tuning(store: SqlStore) -> None:
    store.create_tuning(tuning())
    ended(store, store.put_best(entry()), "c1", VerdictKind.WORSE)
    assert store.set_check_tuning("c1", "tuning-1")
    assert not store.set_check_tuning("c1", "tuning-1")
    assert store.check("c1").tuning_id == "tuning-1"
