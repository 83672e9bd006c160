"""Checks that find damage, and counts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from fleet_records import granted, job, pair
from store_records import FINGERPRINT, MODEL, step_reading, trial, tuning

from autotune.errors import StoreError
from storage import open_store
from storage.care.maintenance import check, migrate, stats
from storage.database.schema import HEAD


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one complete trial."""
    path = tmp_path / "a.db"
    with open_store(f"sqlite:///{path}") as store:
        store.put_model(MODEL)
        store.create_tuning(tuning())
        store.start_trial(trial(0))
        store.finish_trial(
            "tuning-1-0",
            reading=step_reading(),
            failure=None,
            outcome_gpu_s=1.0,
            setup_s=0.0,
            fingerprint_key=store.put_fingerprint(FINGERPRINT),
        )
    return path


def damage(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_sound_database(path: Path) -> None:
    report = check(f"sqlite:///{path}")
    assert report.sound
    assert (report.database, report.schema, report.problems) == (str(path), HEAD, ())


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM tunings", "tuning_trials: 1 rows whose tuning_id is not in tunings"),
        ("DELETE FROM rank_measurements", "rank_comm_times: 4 rows whose rank_measurement_id"),
        ("UPDATE step_measurements SET fingerprint_key = 'x'", "step_measurements: 1 rows whose fingerprint_key"),
        ("DELETE FROM step_measurements", "tuning_trials: 1 complete or pruned trials without a measurement"),
        ("DROP TABLE rank_comm_times", "rank_comm_times: the table is missing"),
        ("DROP INDEX ix_tunings_created_at", "tunings: the index over created_at is missing"),
        ("ALTER TABLE tunings DROP COLUMN seed", "tunings: the column seed is missing"),
    ],
)
def test_what_is_lost_is_found(path: Path, statement: str, problem: str) -> None:
    damage(path, statement)
    report = check(f"sqlite:///{path}")
    assert not report.sound
    assert any(line.startswith(problem) for line in report.problems), report.problems


def test_a_lease_that_outlives_its_job_is_found(path: Path) -> None:
    with open_store(f"sqlite:///{path}") as store:
        pair(store)
        granted(store, job("job-1"))
    assert check(f"sqlite:///{path}").sound
    damage(path, "UPDATE jobs SET state = 'ended'")
    assert check(f"sqlite:///{path}").problems == ("leases: 2 nodes held by jobs that do not run",)


def test_a_damaged_index_is_found(path: Path) -> None:
    connection = sqlite3.connect(path)
    root = "SELECT rootpage FROM sqlite_master WHERE name = 'ix_tunings_created_at'"
    (page,), (size,) = connection.execute(root).fetchone(), connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    content = bytearray(path.read_bytes())
    # An empty index page: its header (type 10, a leaf of an index) with no cells.
    content[(page - 1) * size : page * size] = b"\x0a" + bytes(4) + size.to_bytes(2) + bytes(size - 7)
    path.write_bytes(content)
    assert "wrong # of entries in index ix_tunings_created_at" in check(f"sqlite:///{path}").problems


def test_a_truncated_file_is_found(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(StoreError, match="not a usable SQLite database"):
        check(f"sqlite:///{path}")


def test_stats_count_our_rows(path: Path) -> None:
    report = stats(f"sqlite:///{path}")
    assert {name: count for name, count in report.rows.items() if count} == {
        "models": 1, "tunings": 1, "tuning_events": 3, "tuning_trials": 1, "step_measurements": 1, "step_samples": 8,
        "rank_measurements": 2, "rank_comm_times": 4, "fingerprints": 1,
    }  # fmt: skip
    assert report.size_bytes == path.stat().st_size


def test_care_of_what_is_not_there_makes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'none.db'}"
    for care in (check, stats):
        with pytest.raises(StoreError, match="no such file"):
            care(url)
    assert list(tmp_path.iterdir()) == []
    assert migrate(url).found is None
    assert check(url).sound
