"""Nights over a store: what is kept, gone on with after a crash, and told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from commands import Command
from databases import Databases
from regression_nights import CLUSTER, FINGERPRINT, MODEL, WORKLOAD, Nights, entry_of

from autotune.errors import StoreConflictError
from autotune.fleet.advance import process_owner
from autotune.regression.local import LocalRegression
from autotune.regression.protocol import order_of
from autotune.specs import Plan, RunnerUp
from autotune.specs.regression import AlertChannel, AlertEvent, CauseKind, Check, CheckState, VerdictKind, series_of
from storage import SqlStore, open_store

BOTH = (AlertChannel.WEBHOOK, AlertChannel.EMAIL)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'a.db'}"


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    with open_store(url) as opened:
        yield opened


def verdict(check: Check) -> VerdictKind:
    assert check.result is not None
    return check.result.verdict


def test_a_check_ends_with_its_verdict_and_the_entry_shows_the_newest_measurement(store: SqlStore) -> None:
    nights = Nights(store)
    assert verdict(nights.check()) is VerdictKind.BASELINE
    assert store.best_page() == [nights.entry]  # a baseline says nothing of the entry
    check = nights.check()
    assert verdict(check) is VerdictKind.UNCHANGED
    assert check.gpu_s == 2.0 * len(store.measurements(check.id))
    (renewed,) = store.best_page()
    assert renewed.id != nights.entry.id
    assert renewed.plan == nights.entry.plan
    assert renewed.interval[0] < renewed.tokens_per_s_per_gpu < renewed.interval[1]
    assert renewed.measured_at > nights.entry.measured_at
    assert renewed.repeats == 5
    nights.entry = renewed
    assert verdict(nights.check()) is VerdictKind.UNCHANGED
    assert nights.ranks.closed == 3


def test_a_loss_opens_an_incident_that_recovers(store: SqlStore) -> None:
    nights = Nights(store, channels=BOTH)
    nights.check()
    worse = nights.check(inside=2.0)
    assert worse.result is not None
    assert worse.result.cause is not None
    assert worse.result.cause.kind is CauseKind.LINK_INSIDE
    assert "bus" in worse.result.cause.subject
    nights.check(inside=2.0)
    (incident,) = store.incidents_page(open_only=True)
    assert incident.key.startswith(CLUSTER.key)
    nights.check()
    assert store.incidents_page(open_only=True) == []
    (incident,) = store.incidents_page()
    assert incident.recovered_at is not None
    alerts = store.due_alerts(incident.recovered_at + timedelta(seconds=1))
    assert sorted(alert.event for alert in alerts) == sorted([*AlertEvent, *AlertEvent])


def test_an_interrupted_check_is_gone_on_with(store: SqlStore) -> None:
    nights = Nights(store)
    nights.ranks.dies_after = 9
    with pytest.raises(KeyboardInterrupt):
        nights.night()
    (left,) = store.checks(state=CheckState.RUNNING)
    assert len(store.measurements(left.id)) == 9
    nights.ranks.dies_after = None
    check = nights.check()
    assert check.id == left.id
    assert [item.number for item in store.measurements(check.id)] == list(range(4 * len(order_of(nights.entry))))


def test_one_that_was_left_long_ago_is_begun_anew(store: SqlStore) -> None:
    nights = Nights(store)
    dead = process_owner().replace(f":{os.getpid()}:", ":999999999:")
    old = Check(
        id="old", entry_id=nights.entry.id, series=series_of(nights.entry), cluster_key=CLUSTER.key,
        environment_key=FINGERPRINT.environment_key, owner=dead, started_at=nights.entry.measured_at,
    )  # fmt: skip
    assert store.create_check(old)
    assert nights.check().id != "old"
    assert store.check("old").state is CheckState.ABANDONED


def test_what_another_living_process_checks_is_left_to_it(store: SqlStore) -> None:
    nights = Nights(store)
    other = Check(
        id="other", entry_id=nights.entry.id, series=series_of(nights.entry), cluster_key=CLUSTER.key, pool="box",
        started_at=nights.entry.measured_at,
    )  # fmt: skip
    assert store.create_check(other)
    with pytest.raises(StoreConflictError, match="pool box"):
        nights.check()


def test_a_night_ends_with_its_budget(store: SqlStore) -> None:
    nights = Nights(store)
    second = store.put_best(entry_of(workload=WORKLOAD.model_copy(update={"seq_len": 64})))
    nights.ranks.machine.visit()
    regression = LocalRegression(store, nights.fleet)
    night = regression.run([nights.entry, second], budget_gpu_s=10.0, retune=False)
    assert [check.entry_id for check in night.checks] == [nights.entry.id]
    assert night.checks[0].result is not None
    assert len(night.checks[0].result.windows) == 1


@pytest.mark.slow
def test_after_a_loss_a_challenger_is_tuned_for_and_remembered(store: SqlStore) -> None:
    second = RunnerUp(plan=Plan(tp=2), tokens_per_s_per_gpu=1400.0, interval=(1390, 1410), repeats=2, too_close=False)
    nights = Nights(store, runner_up=second)
    nights.night()
    night = nights.night(inside=2.0, retune=True)
    (tuning,) = night.tunings
    assert store.check(night.checks[0].id).tuning_id == tuning.id
    assert (tuning.model, tuning.workload) == (MODEL, WORKLOAD)
    assert tuning.state.ended


def tell(url: str) -> None:
    with open_store(url) as store:
        nights = Nights(store)
        for trouble in ({}, {}, {"inside": 2.0}):
            nights.check(**trouble)


@pytest.fixture
def told(databases: Databases, tmp_path: Path, url: str) -> Iterator[Nights]:
    """A baseline, a good night and a bad one."""
    Path(databases.filled("sqlite", tmp_path, tell).removeprefix("sqlite:///")).rename(tmp_path / "a.db")
    with open_store(url) as store:
        yield Nights(store, entry=store.best_page()[0])


def test_status_shows_the_last_verdicts_and_says_so_by_its_exit(autotune: Command, url: str, told: Nights) -> None:
    done = autotune("regress", "status", "--db", url, "--json")
    assert done.status == 1
    (row,) = done.data["checks"]
    assert row["result"]["verdict"] == "worse"
    assert row["result"]["cause"]["kind"] == "link_inside"
    assert row["result"]["windows"] >= 2
    assert done.data["never_checked"] == []
    shown = autotune("regress", "status", "--db", url).out
    assert "worse" in shown
    assert "bus" in shown
    told.check()
    assert autotune("regress", "status", "--db", url).status == 0


def test_history_and_incidents(autotune: Command, url: str, told: Nights) -> None:
    kinds = [row["result"]["verdict"] for row in autotune("regress", "history", "--db", url, "--json").data["checks"]]
    assert kinds == ["worse", "unchanged", "baseline"]
    shown = autotune("regress", "history", "--entry", told.entry.id, "--limit", 1, "--db", url)
    assert "worse" in shown.out
    assert "unchanged" not in shown.out
    (incident,) = autotune("regress", "incidents", "--open", "--db", url, "--json").data["incidents"]
    assert incident["kind"] == "link_inside"
    assert "open" in autotune("regress", "incidents", "--db", url).out


def test_the_report_has_verdicts_plots_and_incidents(autotune: Command, url: str, told: Nights, tmp_path: Path) -> None:
    page, text = tmp_path / "report.html", tmp_path / "report.md"
    assert autotune("regress", "report", "--html", page, "--markdown", text, "--db", url).status == 0
    html, markdown = page.read_text(), text.read_text()
    for content in (html, markdown):
        assert "worse" in content
        assert "link bus inside nodes of here" in content
        assert "Incidents" in content
    assert "<svg" in html
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "")
    (picture,) = tmp_path.glob("report-entry-*.svg")
    assert picture.name in markdown
    assert autotune("regress", "report", "--db", url).out.startswith("# Regression report")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "--entry", 99), "99"),
        (("run", "--budget-gpu-s", 0), "--budget-gpu-s"),
        (("run", "--budget-gpu-s", "nan"), "--budget-gpu-s"),
        (("run", "--entry", "one"), "--entry"),
        (("history", "--entry", 99), "99"),
        (("report", "--html", "/nowhere/report.html"), "/nowhere"),
    ],
)
def test_wrong_input_is_one_clear_error(
    autotune: Command, url: str, store: SqlStore, arguments: tuple[object, ...], named: str
) -> None:
    done = autotune("regress", *arguments, "--db", url)
    assert done.status == 2
    assert named in done.err
    assert done.err.count("\n") == 1


def test_imported_entries_and_half_set_up_alerts_are_refused(
    autotune: Command, url: str, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = store.put_best(entry_of(source="a paper"))
    done = autotune("regress", "run", "--entry", imported.id, "--db", url, "--json")
    assert (done.status, done.data["error"]["what"]) == (2, "--entry")
    monkeypatch.setenv("AUTOTUNE_WEBHOOK_URL", "http://127.0.0.1:9/token-of-mine")
    done = autotune("regress", "run", "--db", url)
    assert done.status == 2
    assert "AUTOTUNE_WEBHOOK_SECRET" in done.err
    assert "token-of-mine" not in done.err


def test_without_anything_to_check_that_is_said(autotune: Command, url: str, store: SqlStore) -> None:
    done = autotune("regress", "run", "--db", url, "--json")
    assert done.status == 0
    assert done.data["checks"] == []
    assert autotune("regress", "status", "--db", url).status == 0


def test_a_fleet_without_nodes_has_nothing_to_start(autotune: Command, url: str, told: Nights) -> None:
    done = autotune("regress", "start", "--db", url, "--json")
    assert done.status == 0
    assert done.data == {"chosen": [], "left_out": [], "too_costly": []}
    done = autotune("regress", "start", "--pool", "nobody's", "--db", url)
    assert done.status == 2
    assert "nobody's" in done.err
