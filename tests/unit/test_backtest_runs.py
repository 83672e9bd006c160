"""What a runs file says, and what is refused of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_file import ROW, failed, four, group_of, row, write

from autotune.backtest.groups import group_runs
from autotune.backtest.runs import RunStatus, read_runs
from autotune.catalog.published import published_cluster
from autotune.errors import InputError
from autotune.specs import CollectiveOp, Failure, FailureKind, Plan, Schedule, StepReading

GIB = 2**30


def test_a_row_becomes_specs_and_a_result(tmp_path: Path) -> None:
    csv_row = row(
        tp=2, pp=2, dp=2, vpp=3, schedule="interleaved-1f1b", sp="True", zero_stage="1.0", micro_batch="4.0",
        recompute="selective", peak_mem_gb=20, mem_alloc_gb=15,
    )  # fmt: skip
    (run,), skipped = read_runs(write(tmp_path / "a.csv", [csv_row]), published_cluster)
    assert skipped == []
    assert run.plan == Plan.from_data(
        {"tp": 2, "pp": 2, "dp": 2, "vpp": 3, "micro_batch": 4, "zero_stage": 1, "recompute": "selective",
         "sequence_parallel": True, "schedule": "interleaved"}
    )  # fmt: skip
    assert (run.model.layers, run.model.gated, run.model.tied, run.model.kv_heads) == (12, False, True, 12)
    assert (run.cluster.devices, run.cluster.device.name) == (8, "a100-80gb-sxm")
    assert (run.workload.seq_len, run.workload.global_batch, run.workload.grad_dtype) == (1024, 64, None)
    assert (run.tokens_per_s_per_gpu, run.reserved_bytes, run.allocated_bytes) == (7000, 20 * GIB, 15 * GIB)


@pytest.mark.parametrize(
    ("csv_row", "gated", "tied"),
    [
        # Llama-1.34B of the Ultra-Scale sweep, whose ffn is 4 x hidden and which is gated all the same.
        ({"params_b": 1.34, "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072}, True, True),
        ({"params_b": 7.24, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000},
         True, False),
        ({"params_b": 175, "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200}, False, True),
        ({"params_b": ""}, False, True),
        ({"params_b": "", "ffn": 2048}, True, False),
    ],
)  # fmt: skip
def test_the_variant_is_the_one_that_has_the_parameters(
    tmp_path: Path, csv_row: dict[str, object], gated: bool, tied: bool
) -> None:
    model = group_of(tmp_path, row(**csv_row, tokens_per_s_per_gpu=100)).model
    assert (model.gated, model.tied) == (gated, tied)


def test_the_speed_follows_from_the_iteration_time(tmp_path: Path) -> None:
    # 64 sequences of 1024 tokens in 2 s on 8 GPUs.
    group = group_of(tmp_path, row(tokens_per_s_per_gpu="", iter_time_s=2))
    assert group.speeds.tolist() == [4096.0]


@pytest.mark.parametrize(
    ("csv_row", "column"),
    [
        ({"layers": 10_001}, "layers"),
        ({"seq_len": "1e30"}, "seq_len"),
        ({"pp": 2**31}, "pp"),
        ({"model_name": "a\x1b[31m"}, "model_name"),
        ({"tp": 2}, "num_gpus"),
        ({"gpu": "H900"}, "gpu"),
        ({"gpu": "H100", "gpu_mem_gb": 96}, "gpu_mem_gb"),
        ({"num_gpus": 12, "dp": 12}, "num_gpus"),
        ({"tokens_per_s_per_gpu": -1}, "tokens_per_s_per_gpu"),
        ({"tokens_per_s_per_gpu": "fast"}, "tokens_per_s_per_gpu"),
        ({"tokens_per_s_per_gpu": "nan"}, "tokens_per_s_per_gpu"),
        ({"tokens_per_s_per_gpu": ""}, "tokens_per_s_per_gpu"),
        ({"tokens_per_s_per_gpu": 10_000_000}, "tokens_per_s_per_gpu"),
        ({"iter_time_s": 2}, "tokens_per_s_per_gpu"),
        ({"mfu": 1.2}, "mfu"),
        ({"peak_mem_gb": 81}, "peak_mem_gb"),
        ({"mem_alloc_gb": -3}, "mem_alloc_gb"),
        ({"layers": 0}, "layers"),
        ({"layers": 1.5}, "layers"),
        ({"hidden": ""}, "hidden"),
        ({"heads": 7}, "heads"),
        ({"kv_heads": 5}, "kv_heads"),
        ({"params_b": 1.3}, "params_b"),
        ({"global_batch": 60}, "global_batch"),
        ({"dtype": "nvfp4"}, "dtype"),
        ({"schedule": "zb-1p"}, "schedule"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"recompute": "some"}, "recompute"),
        ({"sp": "maybe"}, "sp"),
        ({"status": "good"}, "status"),
        ({"ep": 2}, "ep"),
        ({"tp": 1, "pp": 8, "dp": 1, "vpp": 2}, "layers"),
        ({"group": ""}, "group"),
        ({"net_allreduce_GBps": 0}, "net_allreduce_GBps"),
    ],
)
def test_a_bad_cell_is_named_with_row_and_column(tmp_path: Path, csv_row: dict[str, object], column: str) -> None:
    path = write(tmp_path / "a.csv", [row(micro_batch=2), row(**csv_row)])
    with pytest.raises(InputError) as raised:
        read_runs(path, published_cluster)
    assert raised.value.what == f"{path}, row 3, column {column}"
    runs, skipped = read_runs(path, published_cluster, skip_bad=True)
    assert (len(runs), [item.where for item in skipped]) == (1, [f"{path}, row 3"])


@pytest.mark.parametrize("column", ["group", "gpu", "status", "micro_batch"])
def test_a_missing_column_is_named_and_cannot_be_skipped(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "a.csv", [row()], without=column)
    with pytest.raises(InputError, match=f"row 1.*missing: {column}"):
        read_runs(path, published_cluster, skip_bad=True)


@pytest.mark.parametrize("content", [b"", b"source,group\n", b"\xff\xfe\x00", ",".join(ROW).encode()])
def test_a_file_without_runs_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.csv"):
        read_runs(tmp_path / "a.csv", published_cluster)
    with pytest.raises(InputError, match=r"b\.csv"):
        read_runs(tmp_path / "b.csv", published_cluster)


def test_filters_keep_what_they_name_and_know_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [row(), row(group="h"), row(source="theirs", group="i", gpu="H900")])
    assert [run.group for run in read_runs(path, published_cluster, sources=["ours"], groups=["h"])[0]] == ["h"]
    with pytest.raises(InputError, match=r"--group: 'j'.*g, h, i"):
        read_runs(path, published_cluster, groups=["j"], skip_bad=True)


def test_a_failed_plan_that_the_model_cannot_have_is_listed_and_no_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [row(), failed("fail", pp=8, dp=1, vpp=2)])
    runs, skipped = read_runs(path, published_cluster)
    assert (len(runs), len(skipped)) == (1, 1)


def test_repeats_of_a_plan_are_one_outcome(tmp_path: Path) -> None:
    group = group_of(
        tmp_path,
        row(tokens_per_s_per_gpu=7000, peak_mem_gb=10), row(tokens_per_s_per_gpu=9000, peak_mem_gb=12),
        row(micro_batch=2, tokens_per_s_per_gpu=5000), failed("oom", micro_batch=2),
        row(micro_batch=4), failed("oom", micro_batch=4), failed("oom", micro_batch=4),
    )  # fmt: skip
    found = {item.plan.micro_batch: (item.status, item.tokens_per_s_per_gpu) for item in group.outcomes}
    assert found == {1: (RunStatus.OK, 8000), 2: (RunStatus.OK, 5000), 4: (RunStatus.OOM, 0)}
    assert group.outcomes[0].reserved_bytes == 12 * GIB


@pytest.mark.parametrize(
    ("csv_row", "column"),
    [({"seq_len": 2048}, "seq_len"), ({"hidden": 960, "params_b": 0.19}, "hidden"), ({"dtype": "fp16"}, "dtype"),
     ({"num_gpus": 16, "dp": 16}, "num_gpus"), ({"gpu": "H100", "gpu_mem_gb": 80}, "gpu")],
)  # fmt: skip
def test_the_rows_of_a_group_must_agree(tmp_path: Path, csv_row: dict[str, object], column: str) -> None:
    other = row(micro_batch=2, **csv_row)
    for order, line in (([row(), row(micro_batch=4), other], 4), ([other, row(), row(micro_batch=4)], 2)):
        runs, _ = read_runs(write(tmp_path / "a.csv", order), published_cluster)
        with pytest.raises(InputError, match=f"row {line}, column {column}"):
            group_runs(runs)
        groups, skipped = group_runs(runs, skip_bad=True)
        assert ({item.plan.micro_batch for item in groups[0].outcomes}, len(skipped)) == ({1, 4}, 1)


def test_a_group_whose_rows_are_half_of_one_and_half_of_another_is_bad(tmp_path: Path) -> None:
    runs, _ = read_runs(write(tmp_path / "a.csv", [row(), row(micro_batch=2, dtype="fp16")]), published_cluster)
    for order in (runs, runs[::-1]):
        with pytest.raises(InputError, match=r"g, column dtype.*1 rows each have two values"):
            group_runs(order)
        groups, skipped = group_runs(order, skip_bad=True)
        assert (groups, len(skipped)) == ([], 1)


def test_a_group_without_a_success_is_bad_and_a_small_one_left_out(tmp_path: Path) -> None:
    runs, _ = read_runs(write(tmp_path / "a.csv", [*four(), failed("oom", group="h")]), published_cluster)
    with pytest.raises(InputError, match=r"'h'.*at least one run that is ok"):
        group_runs(runs)
    groups, skipped = group_runs(runs, skip_bad=True)
    assert ([group.name for group in groups], len(skipped)) == (["g"], 1)
    assert group_runs(runs[:4], min_ok=4) == ([], [])


def test_the_search_is_told_only_what_the_file_says(tmp_path: Path) -> None:
    group = group_of(tmp_path, *four()[1:], row(micro_batch=1, peak_mem_gb=12, mem_alloc_gb=9))
    with_memory, without, _, oom = (group.result(i) for i in range(4))
    assert isinstance(with_memory, StepReading)
    assert (with_memory.peak_reserved_bytes, with_memory.peak_allocated_bytes) == (12 * GIB, 9 * GIB)
    assert isinstance(without, StepReading)
    assert (without.peak_reserved_bytes, without.tokens_per_s_per_gpu) == (0, 9700)
    assert without.step_time_s == pytest.approx(64 * 1024 / (9700 * 8))
    assert isinstance(oom, Failure)
    assert oom.kind is FailureKind.OOM


def test_collective_readings_are_one_probe_of_the_group(tmp_path: Path) -> None:
    rates = [(40, 200), (50, 220), (90, 210), ("", "")]
    rows = [
        row(num_gpus=16, dp=16, micro_batch=2**i, global_batch=128, net_allreduce_GBps=net, intra_allreduce_GBps=intra)
        for i, (net, intra) in enumerate(rates)
    ]
    inside, across = group_of(tmp_path, *rows).readings
    assert (inside.op, inside.group_size, inside.busbw_bytes_per_s) == (CollectiveOp.ALL_REDUCE, 8, 210e9)
    assert (across.group_size, across.busbw_bytes_per_s) == (16, 50e9)
    assert across.algbw_bytes_per_s == pytest.approx(50e9 * 16 / 30)
    assert across.time_s == pytest.approx(across.size_bytes / across.algbw_bytes_per_s)


def test_a_schedule_is_what_the_file_says_or_the_usual_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [row(pp=2, dp=4), row(pp=2, dp=4, vpp=2), row(pp=2, dp=4, schedule="gpipe")])
    runs, _ = read_runs(path, published_cluster)
    assert [run.plan.schedule for run in runs] == [Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE]
