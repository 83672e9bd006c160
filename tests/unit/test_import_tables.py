"""nccl-tests' output as collective readings, and runs files as runs."""

from __future__ import annotations

from pathlib import Path

import import_logs
import pytest

from autotune.catalog import load_model
from autotune.catalog.gpus import cluster_from_shorthand
from autotune.catalog.published import published_cluster
from autotune.errors import InputError
from autotune.imports import Format, Imported, Stated, read_log, read_table
from autotune.specs import CollectiveOp, FailureKind, Plan

SIXTEEN = cluster_from_shorthand("h100-80gb-sxm:2x8")


def nccl(text: str, shorthand: str = "h100-80gb-sxm:2x8") -> Imported:
    return read_log(Format.NCCL_TESTS, "n.txt", text, Stated(cluster=cluster_from_shorthand(shorthand)))


def test_a_sweep_becomes_readings_of_its_layout() -> None:
    found = nccl(import_logs.nccl_tests())
    readings = [item.reading for item in found.readings]
    assert {(item.op, item.group_size, item.stride, item.iterations) for item in readings} == {
        (CollectiveOp.ALL_REDUCE, 16, 1, 20)
    }
    assert [item.size_bytes for item in readings] == [2**20, 2**25, 2**30]
    assert readings[2].time_s == pytest.approx(5600e-6)
    assert readings[2].busbw_bytes_per_s == pytest.approx(2**30 / 5600e-6 * 2 * 15 / 16)
    assert found.notes == []
    assert found.readings[0].where == "n.txt, line 25"
    assert nccl(import_logs.nccl_tests().replace("_perf", "_perf_mpi")).readings[0].reading == readings[0]


def test_spaces_and_labels_before_and_in_a_line_of_a_rank_change_nothing() -> None:
    text = import_logs.nccl_tests()
    expected = nccl(text).readings
    assert nccl(text.replace(" device", "  device")).readings == expected
    assert nccl("".join(f" 0: {line}\n" for line in text.splitlines())).readings == expected


def test_a_label_or_a_line_of_a_rank_that_is_not_understood_is_named() -> None:
    text = import_logs.nccl_tests()
    with pytest.raises(InputError, match=r"line 5, label.*'<<0>> '.*take it off"):
        nccl("".join(f"<<0>> {line}\n" for line in text.splitlines()))
    with pytest.raises(InputError, match=r"line 5, rank.*must be .#  Rank N"):
        nccl(text.replace(" device ", " dev "))


def test_ranks_on_other_gpus_than_the_clusters_are_refused() -> None:
    text = import_logs.nccl_tests()
    for name, allowed in (("NVIDIA H800", "this is h800-80gb-sxm"), ("NVIDIA Z900", "the catalog does not know")):
        with pytest.raises(InputError, match=allowed):
            nccl(text.replace("NVIDIA H100 80GB HBM3", name))


@pytest.mark.parametrize(
    ("test", "op"),
    [
        ("all_gather", CollectiveOp.ALL_GATHER),
        ("reduce_scatter", CollectiveOp.REDUCE_SCATTER),
        ("alltoall", CollectiveOp.ALL_TO_ALL),
    ],
)
def test_each_test_is_an_operation_of_ours(test: str, op: CollectiveOp) -> None:
    found = nccl(import_logs.nccl_tests(test, hosts=1))
    assert {(item.reading.op, item.reading.group_size) for item in found.readings} == {(op, 8)}


def test_two_ranks_send_and_receive() -> None:
    found = nccl(import_logs.nccl_tests("sendrecv", hosts=1, local=2))
    assert {item.reading.op for item in found.readings} == {CollectiveOp.SEND_RECV}
    with pytest.raises(InputError, match="sendrecv of 2 ranks"):
        nccl(import_logs.nccl_tests("sendrecv"))


def test_an_interrupted_sweep_gives_its_complete_rows_and_says_so() -> None:
    text = import_logs.nccl_tests(end=False)
    found = nccl(text[:-90])
    assert [item.reading.size_bytes for item in found.readings] == [2**20, 2**25]
    assert found.notes == [
        "n.txt: line 27 is cut off and left out",
        "n.txt: the sweep did not come to its end; its complete rows are taken",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (import_logs.nccl_tests("broadcast"), r"line 1, test.*'broadcast_perf'.*all_reduce_perf, all_gather_perf"),
        (import_logs.nccl_tests().replace("all_reduce_perf", "test"), "no name of a test"),
        (import_logs.nccl_tests(hosts=4), r"ranks by host.*h100-80gb-sxm:2x8 has 2 nodes of 8"),
        (import_logs.nccl_tests(local=4), r"ranks by host.*must be on one, or fill those they are on"),
        (import_logs.nccl_tests(hosts=1, local=1), "at least 2 ranks"),
        (import_logs.nccl_tests().replace("H100 80GB HBM3", "A100-SXM4-80GB"), r"GPU.*has h100.*this is a100-80gb-sxm"),
        (import_logs.nccl_tests().replace("Group  0", "Group  1"), "one communicator"),
        (import_logs.nccl_tests().replace("    60.0 ", "   -60.0 "), r"line 25, time.*'-60.0'.*above 0"),
        (import_logs.nccl_tests().replace("   300.0 ", "   0.300 "), r"line 26, algbw.*size and time make 111848.11"),
        (import_logs.nccl_tests().replace("all_reduce_perf", "all_gather_perf"), r"line 25, busbw.*size and time make"),
        (import_logs.nccl_tests().replace("      0   ", "      7   "), r"line 25, #wrong.*'7'.*must be 0"),
        (import_logs.nccl_tests()[:1500], "at least one complete row"),
    ],
)
def test_what_no_sweep_can_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        nccl(text)


def table(tmp_path: Path, text: str, **options: object) -> Imported:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    return read_table(path, published_cluster, **options)


def test_a_runs_file_becomes_runs_and_readings(tmp_path: Path) -> None:
    rows = import_logs.runs_row() + import_logs.runs_row("4,1,2,1,4,1", "", "oom")
    found = table(tmp_path, import_logs.RUNS_HEADER + rows)
    fast, broken = found.runs
    assert (fast.plan, fast.tokens_per_s_per_gpu) == (Plan(tp=2, dp=4, micro_batch=2, zero_stage=1), 9000.0)
    assert (fast.framework, fast.group, fast.peak_reserved_bytes) == ("megatron", "g", 60 * 2**30)
    assert broken.failure is not None
    assert broken.failure.kind is FailureKind.OOM
    (reading,) = found.readings
    assert (reading.reading.group_size, reading.reading.busbw_bytes_per_s) == (8, pytest.approx(380e9))


def test_the_named_model_is_kept_or_refused_with_both_names(tmp_path: Path) -> None:
    text = import_logs.RUNS_HEADER + import_logs.runs_row()
    model = load_model("llama3.1-8b")
    assert [run.model for run in table(tmp_path, text, model=model).runs] == [model]
    with pytest.raises(InputError, match=r"row 2, column layers.*of Llama 3.1 8B; llama3.1-70b has layers=80"):
        table(tmp_path, text, model=load_model("llama3.1-70b"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (import_logs.runs_row(speed="-9000"), r"row 3, column tokens_per_s_per_gpu.*'-9000'"),
        (import_logs.runs_row(speed="90000"), r"row 3, column tokens_per_s_per_gpu.*TFLOP/s of a peak"),
        (import_logs.runs_row().replace("sxm,8,8", "sxm,8,0"), r"row 3, column num_gpus.*'0'"),
        (import_logs.runs_row().replace(",60,", ",90,"), r"row 3, column peak_mem_gb.*'90'.*79.6 GiB"),
        (import_logs.runs_row()[:-30], r"row 3.*the last row is cut off.*nothing of this file is imported"),
    ],
)
def test_a_bad_row_refuses_the_whole_file(tmp_path: Path, row: str, message: str) -> None:
    text = import_logs.RUNS_HEADER + import_logs.runs_row() + row
    with pytest.raises(InputError, match=message):
        table(tmp_path, text)


def test_bad_rows_can_be_left_out_by_name(tmp_path: Path) -> None:
    text = import_logs.RUNS_HEADER + import_logs.runs_row(speed="-1") + import_logs.runs_row()
    found = table(tmp_path, text, skip_bad=True)
    assert len(list(found.runs)) == found.run_count == 1
    assert "row 2, column tokens_per_s_per_gpu" in found.notes[0]
