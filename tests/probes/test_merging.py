"""What the reports of a gang amount to: the cause among them, whose it is, and reports that cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from gangs import gang_cluster, member

from autotune.specs import (
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    FailureKind,
    JobMember,
    MemberReport,
    ProbeOutcome,
    RankReport,
)
from probes.launch.merging import blamed_node, merged_outcome

REQUEST = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1000,), iterations=2, warmup=0)
OOM, HANG, CRASH = FailureKind.OOM, FailureKind.HANG, FailureKind.CRASH
COMMUNICATION, LOST, UNAVAILABLE = FailureKind.COMMUNICATION, FailureKind.LOST, FailureKind.UNAVAILABLE
CANCELLED, ILLEGAL = FailureKind.CANCELLED, FailureKind.ILLEGAL


def good(rank: int, time_s: float = 1.0) -> RankReport:
    return RankReport(rank=rank, report={"sweep": [{"size_bytes": 1000, "times_s": [time_s, time_s]}]})


def bad(rank: int, kind: FailureKind, **more: Any) -> RankReport:
    return RankReport(rank=rank, failure=kind, message=f"rank {rank}: {kind}", **more)


def reported(*ranks: RankReport, **more: Any) -> MemberReport:
    failure = next((rank.failure for rank in ranks if rank.failure is not None), None)
    return MemberReport(**{"ranks": ranks, "failure": failure, "wall_s": 2.0, "setup_s": 1.0} | more)


def told(kind: FailureKind, *ranks: RankReport) -> MemberReport:
    return reported(*ranks, failure=kind, message=f"told {kind}", ordered=True)


def gang(*reports: MemberReport | None) -> list[JobMember]:
    return [member(index, report) for index, report in enumerate(reports)]


def outcome(members: Sequence[JobMember]) -> ProbeOutcome:
    return merged_outcome(REQUEST, gang_cluster(2), members)


def test_ranks_are_known_by_number_not_by_place() -> None:
    slow_last = gang(reported(good(0), good(1, 3.0)), reported(good(2), good(3), wall_s=5.0))
    mixed = [
        slow_last[1].model_copy(update={"report": reported(good(3), good(2), wall_s=5.0)}),
        slow_last[0].model_copy(update={"report": reported(good(1, 3.0), good(0))}),
    ]
    for members in (slow_last, mixed):
        result = outcome(members)
        (reading,) = result.readings
        assert isinstance(reading, CollectiveReading)
        assert reading.time_s == 3.0
        assert (result.wall_s, result.gpu_s, result.setup_s) == (5.0, 20.0, 1.0)
        assert blamed_node(members) is None


@pytest.mark.parametrize(
    ("reports", "kind", "rank", "blamed"),
    [
        ([reported(bad(0, COMMUNICATION)), reported(bad(3, OOM))], OOM, 3, None),
        ([reported(bad(0, HANG), bad(1, HANG)), reported(bad(2, CRASH))], CRASH, 2, "node-b"),
        ([told(CRASH, bad(0, COMMUNICATION)), reported(bad(2, CRASH))], CRASH, 2, "node-b"),
        ([reported(bad(0, ILLEGAL), bad(1, ILLEGAL)), reported(bad(2, ILLEGAL))], ILLEGAL, 0, None),
        ([reported(bad(0, HANG)), reported(bad(2, HANG, stopped=True))], HANG, 2, "node-b"),
        ([reported(bad(0, HANG)), told(HANG, bad(2, HANG, stopped=True))], HANG, 2, "node-b"),
        ([reported(bad(0, HANG)), reported(bad(2, HANG))], HANG, 0, None),
        ([reported(good(0), good(1)), reported(good(2), bad(3, HANG))], HANG, 3, "node-b"),
        ([reported(bad(0, COMMUNICATION)), reported(bad(2, COMMUNICATION))], COMMUNICATION, 0, None),
        ([reported(bad(0, COMMUNICATION)), told(COMMUNICATION)], COMMUNICATION, 0, None),
        ([reported(bad(1, COMMUNICATION)), None], LOST, None, "node-b"),
        ([told(LOST, bad(0, COMMUNICATION)), reported(failure=LOST, message="not warm")], LOST, None, "node-b"),
        ([None, reported(bad(2, OOM))], OOM, 2, None),
        ([None, None], LOST, None, None),
        ([told(CANCELLED), reported(bad(2, COMMUNICATION))], CANCELLED, None, None),
        ([reported(failure=UNAVAILABLE, message="no fork"), told(UNAVAILABLE)], UNAVAILABLE, None, "node-a"),
    ],
)
def test_the_cause_over_all_nodes(
    reports: list[MemberReport | None], kind: FailureKind, rank: int | None, blamed: str | None
) -> None:
    members = gang(*reports)
    for order in (members, members[::-1]):
        failure = outcome(order).failure
        assert failure is not None
        assert (failure.kind, failure.rank) == (kind, rank)
        assert blamed_node(order) == blamed
        assert blamed is None or blamed in failure.message


def test_a_node_that_was_lost_alone_is_blamed() -> None:
    assert blamed_node(gang(None)) == "node-a"


def test_a_failure_carries_its_log() -> None:
    failure = outcome(
        gang(reported(bad(1, CRASH, log_path="/logs/rank-1.log", log_tail="the end")), told(CRASH))
    ).failure
    assert failure is not None
    assert failure.message == "node node-a: rank 1: crash"
    assert (failure.log_path, failure.log_tail) == ("/logs/rank-1.log", "the end")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (gang(reported(good(0), good(1)), reported(good(2))), r"node node-b reported ranks \[2\], not \[2, 3\]"),
        (gang(reported(good(0), good(0)), reported(good(2), good(3))), r"node-a reported ranks \[0, 0\]"),
        (gang(reported(good(2), good(3)), reported(good(2), good(3))), r"node-a reported ranks \[2, 3\], not \[0, 1\]"),
        (gang(reported(good(0), good(1))), r"a gang of 2 nodes has members \[0\]"),
        ([], r"a gang of 2 nodes has members \[\]"),
        (gang(reported(good(0), RankReport(rank=1)), reported(good(2), good(3))), "for rank 1"),
        (gang(reported(good(0), good(1)), reported(good(2), good(3, float("inf")))), "no reading"),
    ],
)  # fmt: skip
def test_reports_that_cannot_be(members: list[JobMember], message: str) -> None:
    result = outcome(members)
    assert result.readings == ()
    assert result.failure is not None
    assert result.failure.kind is CRASH
    assert re.search(message, result.failure.message)


@pytest.mark.parametrize("report", [{}, {"sweep": None}, {"sweep": [{"size_bytes": 1, "times_s": []}]}, {"rank": 0}])
def test_a_report_of_another_shape(report: dict[str, Any]) -> None:
    members = gang(reported(good(0), RankReport(rank=1, report=report)), reported(good(2), good(3)))
    failure = outcome(members).failure
    assert failure is not None
    assert failure.kind is CRASH
