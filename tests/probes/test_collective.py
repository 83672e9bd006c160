"""The collective probe on real gloo ranks, and its figures against nccl-tests' definitions."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from local_ranks import AMPLE_S

from autotune.errors import InputError
from autotune.specs import CollectiveOp, CollectiveRequest
from probes.launch import LocalProber, RankPool
from probes.reports import bus_factor, members, merge_collective

SIZES = (64, 100_000)


def request(op: CollectiveOp, group_size: int = 2, stride: int = 1, **more: object) -> CollectiveRequest:
    data = {"op": op.value, "group_size": group_size, "stride": stride, "sizes_bytes": list(SIZES), **more}
    return CollectiveRequest.from_data(data)


LAYOUTS = [
    (op, group_size, stride)
    for op in CollectiveOp
    for group_size, stride in ((2, 1), (2, 2), (4, 1))
    if group_size == 2 or op is not CollectiveOp.SEND_RECV
]


@pytest.mark.parametrize(("op", "group_size", "stride"), LAYOUTS)
def test_every_operation_on_every_layout(four: LocalProber, op: CollectiveOp, group_size: int, stride: int) -> None:
    outcome = four.run(request(op, group_size, stride, iterations=3), deadline_s=AMPLE_S)
    assert outcome.failure is None
    assert [reading.size_bytes for reading in outcome.readings] == list(SIZES)  # type: ignore[union-attr]
    for reading in outcome.readings:
        assert (reading.op, reading.group_size, reading.stride, reading.iterations) == (op, group_size, stride, 3)  # type: ignore[union-attr]
        assert 0 < reading.time_p10_s <= reading.time_s <= reading.time_p90_s < 10  # type: ignore[union-attr]


def test_groups_are_destroyed(pool: RankPool, tmp_path: Path) -> None:
    deadline = time.monotonic() + AMPLE_S
    for number, op in enumerate([CollectiveOp.ALL_REDUCE, CollectiveOp.SEND_RECV]):
        data = request(op).to_data()
        assert pool.run("probes.collective", data, deadline=deadline, log_dir=tmp_path / str(number)).failure is None
    gathered = pool.run("hazards", {"kind": "nothing"}, deadline=deadline, log_dir=tmp_path / "after")
    assert [report["groups"] for report in gathered.reports.values()] == [1, 1]


def test_layouts_are_those_of_a_mesh_axis() -> None:
    everyone = request(CollectiveOp.ALL_REDUCE, 8)
    assert members(everyone, 8) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    middle = request(CollectiveOp.ALL_REDUCE, 2, 2)
    assert members(middle, 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    outer = request(CollectiveOp.ALL_GATHER, 2, 4)
    assert members(outer, 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("op", "group_size", "stride", "message"),
    [
        (CollectiveOp.ALL_REDUCE, 3, 1, "must divide the 8 ranks"),
        (CollectiveOp.ALL_REDUCE, 4, 4, "must divide the 8 ranks"),
        (CollectiveOp.SEND_RECV, 4, 1, "send_recv is between 2 ranks"),
    ],
)
def test_layouts_that_do_not_cover_the_world(op: CollectiveOp, group_size: int, stride: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        members(request(op, group_size, stride), 8)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor(CollectiveOp.ALL_REDUCE, 4) == 1.5
    assert bus_factor(CollectiveOp.ALL_GATHER, 4) == 0.75
    assert bus_factor(CollectiveOp.REDUCE_SCATTER, 4) == 0.75
    assert bus_factor(CollectiveOp.ALL_TO_ALL, 4) == 0.75
    assert bus_factor(CollectiveOp.SEND_RECV, 2) == 1.0


def test_the_slowest_rank_sets_the_time_of_an_iteration() -> None:
    asked = request(CollectiveOp.ALL_REDUCE, 4)
    times_s = [[1.0, 5.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 3.0], [1.0, 1.0, 1.0]]
    reports = {rank: {"sweep": [{"size_bytes": 600, "times_s": times_s[rank]}]} for rank in (3, 2, 1, 0)}
    (reading,) = merge_collective(asked, reports)
    assert reading.time_s == 3.0  # the median of 2, 5, 3
    assert reading.time_p10_s == pytest.approx(2.2)
    assert reading.time_p90_s == pytest.approx(4.6)
    assert reading.algbw_bytes_per_s == 200.0
    assert reading.busbw_bytes_per_s == 300.0
