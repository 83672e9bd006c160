"""Kineto traces: figures against intervals worked out by hand, a real trace of gloo, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from autotune.errors import InputError
from probes.kineto import read_trace, read_traces


def kernel(name: str, ts: float, dur: float, device: int = 0, **more: object) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": device, "tid": 7,
            "args": {"device": device, **more}}  # fmt: skip


EVENTS = [
    kernel("sm90_xmma_gemm_bf16", 0.0, 100.0),
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50.0, 100.0),
    {**kernel("Memcpy DtoD", 200.0, 10.0), "cat": "gpu_memcpy"},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 50.0, "dur": 100.0, "pid": 0, "tid": 7},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 0.0, "dur": 300.0, "pid": 1, "tid": 1},
    {"ph": "i", "name": "Record Window End", "ts": 400.0},
]


def written(path: Path, events: list[dict[str, Any]], rank: int | None = 3) -> Path:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8}}
    text = json.dumps({"schemaVersion": 1, **info, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_intervals_of_the_device_are_divided(tmp_path: Path, name: str) -> None:
    (found,) = read_trace(written(tmp_path / name, EVENTS))
    assert (found.rank, found.device, found.steps) == (3, "0", 1)
    assert found.seconds.calc_s == pytest.approx(110e-6)
    assert found.seconds.comm_s == pytest.approx(100e-6)
    assert found.seconds.exposed_s == pytest.approx(50e-6)  # 100 to 150
    assert found.span_s == pytest.approx(210e-6)
    assert found.mu == pytest.approx(100 / 110)
    assert dict(found.counts) == {"all_reduce": 1}


@pytest.mark.parametrize(
    ("event", "operation"),
    [
        (kernel("ncclKernel_ReduceScatter_RING_LL_Sum_half", 0, 9), "reduce_scatter"),
        (kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage)", 0, 9, **{"Collective name": "_allgather_base"}),
         "all_gather"),
        (kernel("ncclDevKernel_Generic", 0, 9), "other"),
        (kernel("mscclpp::collective::allreduce6<__half>", 0, 9), "all_reduce"),
        (kernel("mscclKernel_Sum_float_Simple", 0, 9), "other"),
        (kernel("void deep_ep::internode::dispatch<false, 8>", 0, 9), "all_to_all"),
    ],
)  # fmt: skip
def test_other_libraries_communicate_too(tmp_path: Path, event: dict[str, Any], operation: str) -> None:
    (found,) = read_trace(written(tmp_path / "t.json", [kernel("gemm", 0, 1), event]))
    assert dict(found.counts) == {operation: 1}


def test_each_rank_is_told(tmp_path: Path, autotune: Command) -> None:
    files = [written(tmp_path / f"{rank}.json", EVENTS, rank) for rank in (1, 0)]
    assert [each.rank for each in read_traces(files)] == [0, 1]
    both = [*EVENTS, *(dict(event, args={"device": 1}) for event in EVENTS if event.get("cat") == "kernel")]
    assert [(each.rank, each.device) for each in read_trace(written(tmp_path / "b.json", both))] == [
        (None, "0"), (None, "1"),
    ]  # fmt: skip
    data = autotune("trace", *files, "--json").data
    assert data["ranks"][0]["by_collective"] == {"all_reduce": {"seconds": pytest.approx(1e-4), "count": 1}}
    assert "all_reduce 100 us in 1" in autotune("trace", *files).out


def test_a_real_trace_of_gloo(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.ones(64, 64)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                dist.all_reduce(values @ values)
        profiler.export_chrome_trace(str(tmp_path / "real.json.gz"))
    finally:
        dist.destroy_process_group()
    (found,) = read_trace(tmp_path / "real.json.gz")
    assert (found.rank, found.device, dict(found.counts)) == (0, "cpu", {"all_reduce": 3})
    assert found.seconds.calc_s > 0
    assert 0 < found.seconds.comm_s <= found.span_s


def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, autotune: Command) -> None:
    whole = written(tmp_path / "whole.json.gz", EVENTS).read_bytes()
    bad = {
        "half.json.gz": (whole[: len(whole) // 2], "a broken gzip file"),
        "half.json": (b'{"traceEvents": [{"ph": "X", ', "a broken trace"),
        "other.json": (b'{"events": []}', "no traceEvents"),
        "text.json": (b"\xff\xfe\x00", "a broken trace"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / name)
    with pytest.raises(InputError, match=r"2 events.*nothing in it communicates"):
        read_trace(written(tmp_path / "alone.json", EVENTS[::2][:2]))
    with pytest.raises(InputError, match="a readable file is needed"):
        read_trace(tmp_path / "absent.json")
    done = autotune("trace", tmp_path / "half.json")
    assert (done.status, done.err.count("\n")) == (2, 1)
