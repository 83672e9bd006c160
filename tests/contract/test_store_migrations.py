"""Migrations from every schema, with data in all its tables, on SQLite and PostgreSQL: nothing is lost or altered."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_records import fleet_tuning
from schemas import REVISIONS_WITH_DATA, make_database
from sqlalchemy import MetaData, select
from store_records import CLUSTER, MODEL, WORKLOAD, step_reading

from autotune.specs import SamplerName, TuningState
from autotune.specs.regression import CauseKind, VerdictKind
from storage import SqlStore, open_store
from storage.care.maintenance import check, migrate
from storage.database.engine import build_engine, locate
from storage.database.schema import HEAD, REVISIONS, VERSION_TABLE

Content = dict[str, list[dict[str, Any]]]


def content(url: str) -> Content:
    """All rows of all tables as they are."""
    engine = build_engine(locate(url), read_only=True)
    with engine.connect() as connection:
        tables = MetaData()
        tables.reflect(connection)
        found = {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in tables.sorted_tables
            if table.name != VERSION_TABLE
        }
    engine.dispose()
    return found


VERDICTS = {"check-1": VerdictKind.UNCHANGED, "check-2": VerdictKind.WORSE}


def assert_fleet_is_read(store: SqlStore) -> None:
    """A job under way on two nodes, one of which has reported."""
    (job,) = store.jobs()
    assert [(member.node, member.state.value) for member in job.members] == [("a", "reported"), ("b", "running")]
    assert [(node.name, node.failures) for node in store.nodes()] == [("a", 0), ("b", 1)]
    assert store.leased_nodes() == {"a": job.id, "b": job.id}
    assert [each.node for each in store.incidents()] == ["b"]
    assert store.submit_tuning(
        fleet_tuning("another"), sharing_key="", request_digest="digest", idempotency_key="once"
    ) == (store.tuning("asked"), False)


def test_earlier_schemas_have_data() -> None:
    assert REVISIONS[:-1] == REVISIONS_WITH_DATA


@pytest.mark.parametrize("revision", REVISIONS_WITH_DATA)
def test_every_row_of_every_table_is_kept(empty_url: str, revision: str) -> None:
    make_database(empty_url, revision)
    before = content(empty_url)
    assert all(before.values()), [name for name, rows in before.items() if not rows]
    assert migrate(empty_url).found == revision
    after = content(empty_url)
    for name, rows in before.items():
        assert [{key: row[key] for key in old} for old, row in zip(rows, after[name], strict=True)] == rows
    assert check(empty_url).sound


@pytest.mark.parametrize("revision", REVISIONS_WITH_DATA)
def test_what_earlier_releases_stored_is_read(empty_url: str, revision: str) -> None:
    make_database(empty_url, revision)
    with open_store(empty_url) as store:
        assert store.model("tiny") == MODEL
        found = store.tuning("first-release")
        assert (found.cluster, found.workload, found.state) == (CLUSTER, WORKLOAD, TuningState.SEARCHING)
        assert found.sampler is (SamplerName.PLAN if revision == "0001" else SamplerName.TPE)
        assert found.history == ("mlops" if revision >= "0004" else "")
        assert [trial.reading for trial in store.trials("first-release")] == [step_reading(), None]
        assert store.best_trials(MODEL, CLUSTER, WORKLOAD)[0].reading == step_reading()
        key = store.trials("first-release")[0].fingerprint_key
        assert [reading.size_bytes for reading in store.collective_readings(CLUSTER.key, key)] == [1024, 2**33]
        assert len(store.layer_readings(CLUSTER.key, key, MODEL.key, WORKLOAD.key)) == 1
        assert store.profile(CLUSTER.key, key) is not None
        if revision >= "0004":
            assert [run.tokens_per_s_per_gpu for run in store.imported_runs("mlops")] == [300.5]
            assert len(store.imported_readings("mlops", CLUSTER.key)) == 1
        if revision >= "0005":
            assert_fleet_is_read(store)
            assert [entry.tuning_id for entry in store.best_page(history=True)] == ["asked", "first-release"]
        if revision >= "0006":
            assert {check.id: check.result and check.result.verdict for check in store.checks()} == VERDICTS
            (incident,) = store.incidents_page(open_only=True)
            assert (incident.kind, len(store.due_alerts(store.now()))) == (CauseKind.LINK_ACROSS, 2)
    assert migrate(empty_url).found == HEAD
