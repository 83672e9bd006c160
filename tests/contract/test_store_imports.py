"""Imports are kept by source, once, whole, and come back only when they are asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from store_records import CLUSTER, FAILURE, FINGERPRINT, MODEL, WORKLOAD, collective_reading, tuning

from autotune.errors import StoreConflictError, StoreReadOnlyError, UnknownNameError
from autotune.specs import Plan
from autotune.specs.imported import ImportBatch, ImportedReading, ImportedRun
from storage import SqlStore, open_store
from storage.care.maintenance import check, stats

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
RUN = ImportedRun(
    where="a.log, line 9", framework="megatron", group="g", model=MODEL, cluster=CLUSTER, workload=WORKLOAD,
    plan=Plan(tp=4, dp=2, zero_stage=1), tokens_per_s_per_gpu=1 / 3, interval_tokens_per_s_per_gpu=(0.3, 0.4),
    steps=11, peak_reserved_bytes=2**36,
)  # fmt: skip
OOM = ImportedRun(
    where="b.log, line 2", framework="torch", model=MODEL, cluster=CLUSTER, workload=WORKLOAD, plan=Plan(dp=8),
    failure=FAILURE,
)  # fmt: skip
READING = ImportedReading(where="c.txt, line 5", cluster=CLUSTER, reading=collective_reading(1024))


def batch(source: str = "cluster-x", digit: str = "0", **changes: Any) -> ImportBatch:
    values = {"source": source, "file_name": "a.log", "format": "megatron", "sha256": digit * 64, "size_bytes": 99}
    return ImportBatch(**{**values, "imported_at": NOW, **changes})


def test_an_import_comes_back_equal_and_by_its_source_only(store: SqlStore) -> None:
    store.save_import(batch(), [RUN, OOM], [READING])
    store.save_import(batch("other", "1"), [OOM], [])
    assert store.imported_runs("cluster-x") == [RUN, OOM]
    assert store.imported_runs("other") == [OOM]
    assert store.imported_readings("cluster-x", CLUSTER.key) == [READING.reading]
    assert store.imported_readings("cluster-x", "another cluster") == []
    assert store.imported_readings("other", CLUSTER.key) == []
    assert store.imports() == [batch(), batch("other", "1")]
    assert store.imports("other") == [batch("other", "1")]
    for look in (store.imported_runs, lambda name: store.imported_readings(name, CLUSTER.key), store.forget_import):
        with pytest.raises(UnknownNameError, match=r"source.*'nobody'.*cluster-x, other"):
            look("nobody")


def test_our_own_measurements_know_nothing_of_imports(store: SqlStore) -> None:
    store.save_import(batch(), [RUN, OOM], [READING])
    store.create_tuning(tuning())
    assert store.best_trials(MODEL, CLUSTER, WORKLOAD) == []
    assert store.trials("tuning-1") == []
    assert store.collective_readings(CLUSTER.key, store.put_fingerprint(FINGERPRINT)) == []


def test_the_same_content_is_stored_once_whatever_its_name(store: SqlStore) -> None:
    store.save_import(batch(), [RUN], [])
    with pytest.raises(StoreConflictError, match=r"the content of 'copy\.log' is imported already"):
        store.save_import(batch("another source", file_name="copy.log"), [RUN, OOM], [READING])
    assert store.imported_runs("cluster-x") == [RUN]
    assert store.imports() == [batch()]


def test_a_log_that_has_grown_takes_the_place_of_its_beginning(store: SqlStore, url: str) -> None:
    store.save_import(batch(), [RUN], [READING])
    store.save_import(batch("other", "5"), [RUN], [])
    store.save_import(batch(digit="2", size_bytes=200), [OOM], [], replaces=["0" * 64, "5" * 64])
    assert store.imported_runs("cluster-x") == [OOM]
    assert store.imported_readings("cluster-x", CLUSTER.key) == []
    assert store.imported_runs("other") == [RUN]  # of another source, whatever its content
    with pytest.raises(StoreConflictError):
        store.save_import(batch(digit="5"), [], [], replaces=["2" * 64])
    assert store.imported_runs("cluster-x") == [OOM]  # what failed has replaced nothing
    assert check(url).sound


def test_a_source_is_forgotten_whole(store: SqlStore, url: str) -> None:
    store.save_import(batch(), [RUN], [READING])
    store.save_import(batch(digit="1"), [OOM], [])
    store.save_import(batch("other", "2"), [OOM], [])
    assert store.forget_import("cluster-x") == 2
    assert store.imports() == [batch("other", "2")]
    assert store.imported_runs("other") == [OOM]
    assert (stats(url).rows["imported_runs"], stats(url).rows["imported_readings"]) == (1, 0)


def test_reading_only_imports_nothing(store: SqlStore, url: str) -> None:
    with open_store(url, read_only=True) as reader:
        with pytest.raises(StoreReadOnlyError):
            reader.save_import(batch(), [RUN], [])
        assert reader.imports() == []


def test_a_tuning_keeps_the_source_that_it_learns_from(store: SqlStore) -> None:
    store.create_tuning(tuning(history="cluster-x"))
    assert store.tuning("tuning-1").history == "cluster-x"
