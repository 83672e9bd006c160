"""From one schema to the next on SQLite and PostgreSQL, with rows in all tables: nothing is lost or altered."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from databases import Databases
from fleet_records import fleet_tuning
from schemas import BASELINE, FOLLOWING, NextRelease, make_database
from sqlalchemy import MetaData, inspect, select
from store_records import CLUSTER, MODEL, WORKLOAD, step_reading

from autotune.errors import StoreError, StoreNewerError, StoreOlderError
from autotune.specs import Budget, SamplerName, Space, TuningState
from autotune.specs.regression import CauseKind, VerdictKind
from storage import SqlStore, open_store
from storage.care.backup import backup, restore
from storage.care.maintenance import check, migrate
from storage.database.columns import Base
from storage.database.engine import build_engine, locate
from storage.database.schema import HEAD, VERSION_TABLE

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


def shape(url: str) -> dict[str, Any]:
    """Columns, keys, constraints and indexes of our tables, in an order of their own."""
    engine = build_engine(locate(url), read_only=True)

    def sorted_parts(parts: list[Any]) -> list[str]:
        for part in parts:
            options = part.get("dialect_options", {})
            options |= {name: str(value) for name, value in options.items()}
        return sorted(str(sorted(part.items(), key=str)) for part in parts)

    with engine.connect() as connection:
        found = inspect(connection)
        shapes = {
            table: [
                {name: (str(each["type"]), each["nullable"], each["default"]) for name, each in by_name.items()},
                sorted_parts([found.get_pk_constraint(table)]),
                sorted_parts(found.get_foreign_keys(table)),
                sorted_parts(found.get_unique_constraints(table)),
                sorted_parts(found.get_check_constraints(table)),
                sorted_parts(found.get_indexes(table)),
            ]
            for table in Base.metadata.tables
            for by_name in [{column["name"]: column for column in found.get_columns(table)}]
        }
    engine.dispose()
    return shapes


def assert_kept(before: Content, after: Content) -> None:
    """Every row is there as it was; it may have columns more."""
    for name, rows in before.items():
        assert [{key: row[key] for key in was} for was, row in zip(rows, after[name], strict=True)] == rows


def execute(url: str, statement: str) -> None:
    engine = build_engine(locate(url), read_only=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


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


@pytest.fixture
def old(kind: str, databases: Databases, tmp_path: Path) -> str:
    """A database as the code before the baseline left it."""
    return databases.filled(kind, tmp_path, make_database)


def test_a_database_of_the_baseline_is_migrated_with_every_row(old: str) -> None:
    before = content(old)
    assert all(before.values()), [name for name, rows in before.items() if not rows]
    assert migrate(old).found == BASELINE
    assert migrate(old).found == HEAD
    assert_kept(before, content(old))
    with open_store(old, read_only=True) as store:
        assert store.model("tiny") == MODEL
        found = store.tuning("first-release")
        assert (found.cluster, found.workload, found.state) == (CLUSTER, WORKLOAD, TuningState.SEARCHING)
        assert (found.sampler, found.history) == (SamplerName.TPE, "mlops")
        assert [trial.reading for trial in store.trials("first-release")] == [step_reading(), None]
        assert store.best_trials(MODEL, CLUSTER, WORKLOAD)[0].reading == step_reading()
        key = store.trials("first-release")[0].fingerprint_key
        assert [reading.size_bytes for reading in store.collective_readings(CLUSTER.key, key)] == [1024, 2**33]
        assert len(store.layer_readings(CLUSTER.key, key, MODEL.key, WORKLOAD.key)) == 1
        assert store.profile(CLUSTER.key, key) is not None
        assert [run.tokens_per_s_per_gpu for run in store.imported_runs("mlops")] == [300.5]
        assert len(store.imported_readings("mlops", CLUSTER.key)) == 1
        assert [entry.tuning_id for entry in store.best_page(history=True)] == ["asked", "first-release"]
        assert {check.id: check.result and check.result.verdict for check in store.checks()} == VERDICTS
        (incident,) = store.incidents_page(open_only=True)
        assert (incident.kind, len(store.due_alerts(store.now()))) == (CauseKind.LINK_ACROSS, 2)
    with open_store(old) as store:
        assert_fleet_is_read(store)
    assert check(old).sound


def test_nobody_migrates_a_shared_database_unasked(old: str, kind: str, tmp_path: Path) -> None:
    """A file of one machine is, and a copy of it as it was is left beside it."""
    before = content(old)
    if kind == "postgresql":
        with pytest.raises(StoreError, match=rf"the older schema '{BASELINE}'.*run `autotune db migrate`"):
            open_store(old)
        assert content(old) == before
        return
    open_store(old).close()
    open_store(old).close()
    assert migrate(old).found == HEAD
    (copy,) = Path(old.removeprefix("sqlite:///")).parent.glob(f"*.db.{BASELINE}-*")
    assert content(f"sqlite:///{copy}") == before
    assert migrate(f"sqlite:///{copy}").found == BASELINE
    assert len(list(tmp_path.iterdir())) == 2


def test_its_tables_are_those_of_a_new_database(old: str, empty_url: str) -> None:
    open_store(empty_url).close()
    migrate(old)
    assert shape(old) == shape(empty_url)


@pytest.mark.parametrize("revision", ["0001", "0006"])
def test_an_older_one_is_refused_with_what_to_do(old: str, revision: str, tmp_path: Path) -> None:
    execute(old, f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")
    before = content(old)
    refused = rf"'{revision}', of before the first release.*run `autotune db migrate` of commit \w+"
    for work in (open_store, migrate, partial(open_store, read_only=True), partial(backup, path=tmp_path / "b")):
        with pytest.raises(StoreOlderError, match=refused):
            work(old)
    assert content(old) == before


def test_the_next_revision_keeps_every_row(old: str, tmp_path: Path) -> None:
    before = content(old)
    told = NextRelease(tmp_path / "next").run(
        "try: open_store(argv[1], read_only=True)\n"
        "except StoreError as error: print(error)\n"
        "done = migrate(argv[1]); print(done.found, done.now, check(argv[1]).problems, migrate(argv[1]).found)",
        old,
    )
    asked, done = told.splitlines()
    assert asked.endswith(f"has the older schema '{BASELINE}': run `autotune db migrate`")
    assert done == f"{BASELINE} {FOLLOWING} () {FOLLOWING}"
    after = content(old)
    assert {row["note"] for row in after["tunings"]} == {"none"}
    assert after.pop("notes") == []
    assert_kept(before, after)
    for work in (open_store, migrate, partial(open_store, read_only=True), partial(backup, path=tmp_path / "b")):
        with pytest.raises(StoreNewerError, match=rf"'{FOLLOWING}'.*upgrade autotune"):
            work(old)


def test_a_revision_that_fails_midway_changes_nothing(old: str, tmp_path: Path) -> None:
    before = content(old)
    assert "ZeroDivisionError" in NextRelease(tmp_path / "next", fails=True).run("migrate(argv[1])", old)
    assert content(old) == before
    migrate(old)
    with open_store(old) as store:
        assert store.model("tiny") == MODEL


def test_the_next_release_backs_up_an_older_database_as_it_is_and_migrates_what_it_restores(
    old: str, empty_url: str, tmp_path: Path
) -> None:
    told = NextRelease(tmp_path / "next").run(
        "saved = Path(argv[2])\n"
        "print(backup(argv[1], saved).schema, restore(argv[3], saved).schema, check(argv[3]).problems)",
        old, tmp_path / "saved", empty_url,
    )  # fmt: skip
    assert told == f"{BASELINE} {FOLLOWING} ()"
    new = {"note": "none", "fault": "", "faults": 0}
    assert content(empty_url)["tunings"] == [row | new for row in content(old)["tunings"]]
    restored = f"sqlite:///{tmp_path / 'restored.db'}"
    assert restore(restored, tmp_path / "saved").schema == HEAD  # as does ours
    with open_store(restored) as store:
        assert [item.reading for item in store.trials("first-release")] == [step_reading(), None]


def test_numbers_that_older_releases_took_without_bounds_are_brought_within_those_of_today(old: str) -> None:
    budget = '{"gpu_s": 1e300, "max_trials": ' + str(10**400) + ', "min_gain": 0.02}'
    space = '{"tp": [1, ' + str(10**30) + ', -1], "zero_stage": [0]}'
    execute(old, f"UPDATE tunings SET budget_json = '{budget}', space_json = '{space}' WHERE id = 'first-release'")
    migrate(old)
    with open_store(old) as store:
        found = store.tuning("first-release")
    assert found.budget == Budget(gpu_s=1e12, max_trials=100_000, min_gain=0.02)
    assert found.space == Space(tp=(1,), zero_stage=(0,))
