"""Backup and restore between databases of both kinds: everything arrives, or nothing changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import optuna
import pytest
from databases import KINDS, Databases
from fleet_records import granted, job, pair
from sqlalchemy import text
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FINGERPRINT,
    LAYER_OUTCOME,
    LAYER_REQUEST,
    MODEL,
    MOMENT,
    WORKLOAD,
    profile,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import InputError, StoreConflictError, StoreError, StoreNewerError
from autotune.specs import ApiKey, Plan, Role
from autotune.specs.imported import ImportBatch, ImportedRun
from storage import SqlStore, open_store
from storage.care.backup import MANIFEST, backup, restore
from storage.care.maintenance import check, migrate, stats
from storage.database.engine import build_engine, locate, writer
from storage.database.schema import HEAD, VERSION_TABLE


def fill(url: str) -> None:
    """Something in most tables."""
    with open_store(url) as store:
        fill_store(store)


def fill_store(store: SqlStore) -> None:
    store.put_model(MODEL)
    store.put_cluster(CLUSTER)
    store.create_tuning(tuning())
    key = store.put_fingerprint(FINGERPRINT)
    store.start_trial(trial(0))
    store.finish_trial(
        "tuning-1-0", reading=step_reading(), failure=None, outcome_gpu_s=1.0, setup_s=0.5, fingerprint_key=key
    )
    for request, outcome in ((COLLECTIVE_REQUEST, COLLECTIVE_OUTCOME), (LAYER_REQUEST, LAYER_OUTCOME)):
        store.save_probe(tuning_id=None, cluster=CLUSTER, fingerprint_key=key, request=request, outcome=outcome)
    store.save_profile(profile(key))
    batch = ImportBatch(
        source="x", file_name="a", format="csv", sha256="0" * 64, size_bytes=1, imported_at=datetime.now(UTC)
    )
    run = ImportedRun(
        where="a, row 2", framework="torch", model=MODEL, cluster=CLUSTER, workload=WORKLOAD, plan=Plan(dp=8),
        tokens_per_s_per_gpu=5.0, interval_tokens_per_s_per_gpu=(4.0, 6.0),
    )  # fmt: skip
    store.save_import(batch, [run], [])


def content(url: str) -> dict[str, int]:
    with open_store(url, read_only=True) as store:
        assert store.model("tiny") == MODEL
        assert store.tuning("tuning-1").model == MODEL
        assert [item.reading for item in store.trials("tuning-1")] == [step_reading()]
        assert len(store.collective_readings(CLUSTER.key, FINGERPRINT.key)) == 2
        assert store.profile(CLUSTER.key) == profile(FINGERPRINT.key)
        assert [run.tokens_per_s_per_gpu for run in store.imported_runs("x")] == [5.0]
    assert check(url).sound
    return stats(url).rows


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, databases: Databases, tmp_path: Path) -> str:
    """Another database, which does not exist yet or is empty."""
    return databases.empty(request.param, tmp_path)


@pytest.fixture
def filled_url(kind: str, databases: Databases, tmp_path: Path) -> str:
    return databases.filled(kind, tmp_path, fill)


@pytest.fixture
def saved(filled_url: str, tmp_path: Path) -> Path:
    """A backup of a filled database."""
    path = tmp_path / "saved.backup"
    assert backup(filled_url, path).schema == HEAD
    return path


@pytest.fixture
def small(databases: Databases, tmp_path: Path) -> Path:
    """A backup of a SQLite database with a model."""
    source = databases.ours("sqlite", tmp_path)
    with open_store(source) as store:
        store.put_model(MODEL)
    path = tmp_path / "small.backup"
    backup(source, path)
    return path


def test_everything_arrives_in_a_database_of_either_kind(filled_url: str, target: str, saved: Path) -> None:
    before = content(filled_url)
    done = restore(target, saved)
    assert content(target) == before
    assert {name: done.rows[name] for name in before} == before
    assert sorted(path.name for path in saved.parent.glob("*saved*")) == ["saved.backup"]
    with open_store(target) as store:  # ids go on after the restored ones, too
        store.save_profile(profile(FINGERPRINT.key, 1.5))
        assert store.profile(CLUSTER.key) == profile(FINGERPRINT.key, 1.5)


def test_what_an_older_release_kept_for_optuna_stays_behind(filled_url: str, empty_url: str, tmp_path: Path) -> None:
    """Its tables may be in the database and, counted, in the backup: ours are saved and restored all the same."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(locate(filled_url).url.render_as_string(hide_password=False))
    optuna.create_study(storage=storage, study_name="tuning-1").ask()
    storage.remove_session()
    storage.engine.dispose()
    before, path = content(filled_url), tmp_path / "saved.backup"
    backup(filled_url, path)
    with sqlite3.connect(path) as connection:
        connection.executemany(
            f"INSERT INTO {MANIFEST} VALUES (?, 1)", [("studies",), ("trials",), ("alembic_version",)]
        )
    connection.close()
    for target in (empty_url, filled_url):  # and back to where Optuna's tables are
        assert restore(target, path, overwrite=True).rows == before
        assert content(target) == before


def test_a_backup_is_one_moment_of_a_database_in_use(filled_url: str, tmp_path: Path) -> None:
    with open_store(filled_url) as store, store.writing() as session:  # somebody's transaction is open
        session.execute(text("UPDATE models SET name = 'renamed'"))
        backup(filled_url, tmp_path / "saved.backup")
    restore(f"sqlite:///{tmp_path / 'restored.db'}", tmp_path / "saved.backup")
    content(f"sqlite:///{tmp_path / 'restored.db'}")


def test_a_backup_replaces_no_file_unasked(filled_url: str, saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(InputError, match="the file exists"):
        backup(filled_url, saved)
    assert saved.read_bytes() == before
    backup(filled_url, saved, overwrite=True)
    for bad in (saved.parent / "no" / "folder", saved.parent):
        with pytest.raises(InputError, match=r"a file that can be written|the file exists"):
            backup(filled_url, bad, overwrite=True)


def test_what_is_not_there_has_no_backup(empty_url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        backup(empty_url, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_database_that_holds_something_is_replaced_only_when_asked(filled_url: str, small: Path) -> None:
    before = content(filled_url)
    with pytest.raises(StoreConflictError, match=r"is not empty; --overwrite replaces"):
        restore(filled_url, small)
    assert content(filled_url) == before
    restore(filled_url, small, overwrite=True)
    with open_store(filled_url) as store:
        assert store.models() == [MODEL]
        assert store.tunings() == []
    assert sum(stats(filled_url).rows.values()) == 1


def test_a_live_database_is_replaced_only_when_asked(target: str, small: Path) -> None:
    with open_store(target) as live:
        assert live.models() == []
        with pytest.raises(StoreConflictError, match=r"is in use by others"):
            restore(target, small)
        assert live.models() == []
        restore(target, small, overwrite=True)
        assert live.models() == [MODEL]
    open_store(target).close()
    with pytest.raises(StoreConflictError, match=r"is not empty"):  # nobody else is there any more
        restore(target, small)


def key(name: str, **changes: object) -> ApiKey:
    return ApiKey(id=f"id-{name}", name=name, role=Role.SUBMIT, created_at=MOMENT).model_copy(update=changes)


def valid(store: SqlStore) -> list[str]:
    return sorted(key.id for key in store.keys() if key.revoked_at is None)  # noqa: SIM118 (no dictionary)


def test_a_restore_keeps_the_keys_of_the_database_and_what_is_revoked(
    url: str, kind: str, databases: Databases, tmp_path: Path
) -> None:
    path, other = tmp_path / "saved", databases.filled(kind, tmp_path, migrate)
    with open_store(url) as store:
        for name in ("kept", "gone", "old"):
            store.create_key(key(name), name)
        store.revoke_key("id-old")
        backup(url, path)
        store.revoke_key("id-gone")
        store.create_key(key("gone", id="id-new"), "new")
        before = store.keys()
        done = restore(url, path, overwrite=True)
        assert (done.keys_revoked, done.keys_left_out) == ((("id-gone", "gone"),), ())
        assert store.keys() == before
        backup(url, path, overwrite=True)
        for name in ("kept", "new"):
            store.revoke_key(f"id-{name}")
    with open_store(other) as store:  # it knows one of them, as another database would
        store.create_key(key("kept"), "kept")
        store.create_key(key("gone", id="id-newest"), "newest")
        done = restore(other, path, overwrite=True, keys=True)
        assert done.keys_left_out == (("id-new", "gone"),)
        assert valid(store) == ["id-kept", "id-newest"]
        assert done.rows["api_keys"] == len(store.keys()) == 4


def test_keys_that_the_database_does_not_know_come_back_only_when_asked(url: str, target: str, tmp_path: Path) -> None:
    with open_store(url) as store:
        store.create_key(key("ada"), "a")
        store.create_key(key("eve", revoked_at=MOMENT), "e")
    backup(url, tmp_path / "saved")
    done = restore(target, tmp_path / "saved")
    assert (done.keys_left_out, done.rows["api_keys"]) == ((("id-ada", "ada"),), 1)
    with open_store(target) as store:
        assert valid(store) == []
        assert list(store.keys_of({"a", "e"})) == ["e"]
        assert restore(target, tmp_path / "saved", overwrite=True, keys=True).keys_left_out == ()
        assert valid(store) == ["id-ada"]


def test_tokens_after_a_restore_are_larger_than_any_before(url: str, target: str, tmp_path: Path) -> None:
    def next_token(store: SqlStore, name: str) -> int:
        return granted(store, job(name), ("a",)).token

    with open_store(url) as store:
        pair(store)
        backup(url, tmp_path / "saved")
        lost = [next_token(store, "job-1"), granted(store, job("job-2"), ("b",)).token]
    for _ in range(2):  # each time into a database that knows nothing of what came after the backup
        restore(target, tmp_path / "saved", overwrite=True)
        with open_store(target) as store:
            lost.append(next_token(store, "job-1"))
    assert lost == sorted(set(lost))
    with open_store(target) as store:
        with store.writing() as session:  # as with a clock that was ahead
            session.execute(text("UPDATE counters SET value = 9007199254740000 WHERE name = 'token'"))
        restore(target, tmp_path / "saved", overwrite=True)
        assert next_token(store, "job-1") == 9007199254740001


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_a_little(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def lose_a_row(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM models")
    connection.close()


def strip(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"DROP TABLE {MANIFEST}")
    connection.close()


def replace(path: Path) -> None:
    path.write_text("no database at all, but some text that is long enough to be one" * 100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "not a whole one|is not whole"),
        (cut_a_little, "not a whole one|is not whole"),
        (lose_a_row, "is not whole"),
        (strip, "no backup"),
        (replace, "no backup"),
        (Path.unlink, "a backup made by"),
    ],
)
def test_half_a_backup_changes_nothing(small: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(small)
    target = small.with_name("target.db")
    with pytest.raises(InputError, match=message):
        restore(f"sqlite:///{target}", small)
    assert not target.exists()


def test_a_restore_that_fails_midway_changes_nothing(filled_url: str, small: Path) -> None:
    before = content(filled_url)
    engine = build_engine(locate(f"sqlite:///{small}"), read_only=False)
    with engine.begin() as connection:  # whole as a file, but a moment in it cannot be read
        connection.exec_driver_sql("UPDATE models SET stored_at = 'yesterday'")
    engine.dispose()
    with pytest.raises(InputError, match="the backup holds what cannot be read"):
        restore(filled_url, small, overwrite=True)
    assert content(filled_url) == before


def test_a_newer_backup_or_database_is_left_alone(target: str, small: Path) -> None:
    newer = small.with_name("newer.backup")
    newer.write_bytes(small.read_bytes())
    with sqlite3.connect(newer) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    with pytest.raises(StoreNewerError, match="'9999'"):
        restore(target, newer)
    open_store(target).close()
    engine = build_engine(locate(target), read_only=False)
    with writer(engine).begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    engine.dispose()
    for overwrite in (False, True):
        with pytest.raises(StoreNewerError, match="'9999'"):
            restore(target, small, overwrite=overwrite)
