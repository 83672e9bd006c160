"""What comes out as frames and files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FAILURE,
    FINGERPRINT,
    LAYER_OUTCOME,
    LAYER_REQUEST,
    MOMENT,
    WORKLOAD,
    profile,
    step_reading,
    trial,
    tuning,
)

from autotune.errors import InputError, UnknownNameError
from autotune.specs import DType, Failure, FailureKind, StepReading
from storage import SqlStore, open_store
from storage.frames import TABLES, export, frame

RESULTS = (
    step_reading(1 / 3),
    FAILURE,
    step_reading(0.2, pruned=True),
    Failure(kind=FailureKind.LOST, message="gone"),
    Failure(kind=FailureKind.CRASH, message="signal 11, then\na second line"),
)
PUBLISHED = [
    "source", "group", "model_name", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len",
    "gpu", "gpu_mem_gb", "gpus_per_node", "num_gpus", "tp", "pp", "cp", "ep", "dp", "vpp", "sp", "zero_stage",
    "micro_batch", "global_batch", "recompute", "dtype", "grad_dtype", "schedule", "tokens_per_s_per_gpu",
    "tflops_per_gpu", "mfu", "iter_time_s", "peak_mem_gb", "mem_alloc_gb", "status", "net_state", "net_allreduce_GBps",
    "intra_allreduce_GBps", "note",
]  # fmt: skip


def test_only_regular_files_are_replaced(store: SqlStore, tmp_path: Path) -> None:
    pipe, link, aim = tmp_path / "pipe", tmp_path / "link.csv", tmp_path / "aim.csv"
    os.mkfifo(pipe)
    aim.write_text("old")
    link.symlink_to(aim)
    for path in (pipe, tmp_path):
        with pytest.raises(InputError, match="no regular file"):
            export(store, "trials", "csv", path, overwrite=True)
    assert pipe.is_fifo()
    with pytest.raises(InputError, match="file exists"):
        export(store, "trials", "csv", link)
    assert export(store, "trials", "csv", link, overwrite=True) == link
    assert link.is_symlink()
    assert "tokens_per_s_per_gpu" in aim.read_text()


def test_a_name_that_no_file_can_have(store: SqlStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="File name too long"):
        export(store, "trials", "csv", tmp_path / ("x" * 300))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as opened:
        opened.create_tuning(tuning())
        key = opened.put_fingerprint(FINGERPRINT)
        for number, result in enumerate(RESULTS):
            opened.start_trial(trial(number))
            opened.finish_trial(
                f"tuning-1-{number}",
                reading=result if isinstance(result, StepReading) else None,
                failure=result if isinstance(result, Failure) else None,
                outcome_gpu_s=1.0,
                setup_s=0.5,
                fingerprint_key=key,
            )
        opened.start_trial(trial(9))
        for request, outcome in ((COLLECTIVE_REQUEST, COLLECTIVE_OUTCOME), (LAYER_REQUEST, LAYER_OUTCOME)):
            opened.save_probe(
                tuning_id="tuning-1", cluster=CLUSTER, fingerprint_key=key, request=request, outcome=outcome
            )
        opened.save_profile(profile(key))
        yield opened


def test_every_table_has_its_rows(store: SqlStore) -> None:
    rows = {table: len(frame(store, table)) for table in TABLES}
    assert rows == {
        "runs": 4, "trials": 6, "tunings": 1, "probes": 2, "collective": 2, "layer": 1, "step": 2, "ranks": 4,
        "profiles": 1,
    }  # fmt: skip


def test_trials_have_plan_estimate_and_measurement_side_by_side(store: SqlStore) -> None:
    trials = frame(store, "trials").set_index("number")
    assert list(trials.state) == ["complete", "failed", "pruned", "failed", "failed", "running"]
    first = trials.loc[0]
    assert (first.tp, first.pp, first.dp, first.plan_key) == (2, 2, 2, "tp2.pp2.dp2.mb1.zero0")
    assert first.tokens_per_s_per_gpu == 1 / 3
    assert first.estimate_tokens_per_s_per_gpu == 1234.5678901234567
    assert (first.t_comm_s, first.mu, first.repeats) == (2 / 3, (2 / 3) / 0.1, 3)
    assert first.started_at == pd.Timestamp(MOMENT)
    assert trials.loc[1].failure_kind == "oom"
    assert trials.loc[1].cluster_key == CLUSTER.key
    assert pd.isna(trials.loc[1].t_comm_s)
    assert pd.isna(trials.loc[9].finished_at)
    assert trials.columns.is_unique


def test_empty_tables_keep_their_types(tmp_path: Path, store: SqlStore) -> None:
    with open_store(f"sqlite:///{tmp_path / 'empty.db'}") as empty:
        for table in TABLES:
            assert list(frame(empty, table).dtypes) == list(frame(store, table).dtypes), table


def test_runs_are_in_the_format_of_published_runs(store: SqlStore) -> None:
    runs = frame(store, "runs")
    assert list(runs.columns) == PUBLISHED
    assert list(runs.status) == ["ok", "oom", "ok", "fail"]
    assert set(runs.group) == {"tiny|pair|128|16"}
    first = runs.iloc[0]
    assert (first.num_gpus, first.gpus_per_node, first.gpu_mem_gb) == (8, 4, 80.0)
    assert (first.iter_time_s, first.peak_mem_gb) == (0.1 + 0.2, 75.0)
    assert first.tflops_per_gpu == pytest.approx(0.41 * 300)
    assert runs.note[2].endswith("pruned")
    assert runs.loc[1, ["tokens_per_s_per_gpu", "peak_mem_gb", "net_state"]].isna().all()


def test_requests_that_share_their_names_are_different_groups(store: SqlStore) -> None:
    in_fp32 = tuning("in-fp32", workload=WORKLOAD.model_copy(update={"dtype": DType.FP32}))
    again = tuning("again")
    for each in (in_fp32, again):
        store.create_tuning(each)
        store.start_trial(trial(0, each.id))
        store.finish_trial(
            f"{each.id}-0", reading=None, failure=FAILURE, outcome_gpu_s=1.0, setup_s=0.0, fingerprint_key=""
        )
    runs = frame(store, "runs")
    groups = runs.group.groupby(runs.dtype).unique()
    assert list(groups["bf16"]) == ["tiny|pair|128|16"]
    (other,) = groups["fp32"]
    assert other.startswith("tiny|pair|128|16|")


@pytest.mark.parametrize("table", TABLES)
def test_parquet_and_csv_hold_the_frame(store: SqlStore, tmp_path: Path, table: str) -> None:
    data = frame(store, table)
    parquet = export(store, table, "parquet", tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), data)
    with export(store, table, "csv", tmp_path / "t.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(data)
    for column in data.select_dtypes("Float64"):
        written = [float(line[column]) if line[column] else None for line in lines]
        assert written == [None if pd.isna(value) else value for value in data[column]]


def test_an_export_never_overwrites_unasked_and_leaves_no_part(store: SqlStore, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "trials.csv"
    target.write_text("precious")
    with pytest.raises(InputError, match="exists"):
        export(store, "trials", "csv", target)
    assert target.read_text() == "precious"
    export(store, "trials", "csv", target, overwrite=True)
    assert target.read_text().startswith("id,tuning_id,number,state")
    with pytest.raises(InputError, match="No such file"):
        export(store, "trials", "csv", folder / "missing" / "trials.csv")
    assert [path.name for path in folder.iterdir()] == ["trials.csv"]


def test_unknown_tables_and_formats_are_named(store: SqlStore, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"'trails'.*trials"):
        frame(store, "trails")
    with pytest.raises(UnknownNameError, match=r"'xlsx'.*csv, parquet"):
        export(store, "trials", "xlsx", tmp_path / "t.xlsx")


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        store.create_tuning(tuning(message="=cmd|' /C calc'!A0"))
        file = export(store, "tunings", "csv", tmp_path / "t.csv")
        parquet = export(store, "tunings", "parquet", tmp_path / "t.parquet")
    with file.open(newline="") as opened:
        (line,) = csv.DictReader(opened)
    assert line["message"] == "'=cmd|' /C calc'!A0"
    assert (line["id"], line["seq_len"]) == ("tuning-1", str(WORKLOAD.seq_len))
    assert list(pd.read_parquet(parquet).message) == ["=cmd|' /C calc'!A0"]


def test_a_run_comes_back_from_its_cell_as_it_was(tmp_path: Path) -> None:
    from autotune.backtest.csv_rows import REQUIRED, read_csv_rows

    file = tmp_path / "runs.csv"
    values = dict.fromkeys(REQUIRED, "1") | {"group": "'=a group", "source": "'a source", "iter_time_s": "1"}
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(values))
        writer.writeheader()
        writer.writerow(values)
    (row,) = read_csv_rows(file)
    assert (row.text("group"), row.text("source")) == ("=a group", "'a source")
