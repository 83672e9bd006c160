"""Worlds across nodes with real ranks: readings, warm reuse, every way to fail, and that no process is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gangs import ENDLESS, NAMES, SHORT, Gang, gang_cluster, stop
from local_ranks import AMPLE_S, assert_gone

from autotune.errors import InputError
from autotune.specs import (
    FailureKind,
    MemberOrder,
    ModelSpec,
    Plan,
    ProbeOutcome,
    ProbeProgress,
    StepReading,
    StepRequest,
    Workload,
)
from probes.launch import NodeRanks, WorldShare
from probes.launch.merging import blamed_node, merged_outcome

SHAPE = {"layers": 2, "heads": 4, "gated": True, "tied": False, "norm": "rmsnorm"}


def loopback_gang(log_root: Path) -> Gang:
    nodes = [NodeRanks(log_root=log_root / name, interface="lo", address="127.0.0.1") for name in NAMES]
    return Gang(gang_cluster(), nodes)


@pytest.fixture(scope="module")
def gang(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two nodes of one rank each, on this machine."""
    with loopback_gang(tmp_path_factory.mktemp("gang")) as gang:
        yield gang


def warmed(gang: Gang) -> list[psutil.Process]:
    """The ranks of a working world, the last one if that works: the deadline of what comes next is the probe's."""
    assert gang.run(SHORT, warm=gang.is_warm).failure is None
    processes = gang.processes()
    assert len(processes) == gang.cluster.devices
    return processes


def struck(gang: Gang, sent: signal.Signals, rank: int, deadline_s: float = AMPLE_S) -> ProbeOutcome:
    """Sends a signal to one rank while all of them measure; afterwards no rank is left."""
    processes = warmed(gang)
    strike = lambda: processes[rank].send_signal(sent)  # noqa: E731
    outcome = gang.run(ENDLESS, warm=True, deadline_s=deadline_s, on_progress=strike)
    assert_gone(processes, 0)
    assert [node.world_id for node in gang.nodes] == ["", ""]
    return outcome


def test_readings_costs_and_warm_reuse(gang: Gang) -> None:
    assert gang.run(SHORT).failure is None
    processes = gang.processes()
    assert gang.board.endpoint.startswith("127.0.0.1:")
    outcome = gang.run(SHORT, warm=True)
    assert outcome.failure is None
    assert [reading.size_bytes for reading in outcome.readings] == [1024, 4096]  # type: ignore[union-attr]
    reports = gang.board.reports.values()
    assert [[rank.rank for rank in report.ranks] for _, report in sorted(gang.board.reports.items())] == [[0], [1]]
    assert all(report.kept_warm for report in reports)
    assert outcome.wall_s == max(report.wall_s for report in reports)
    assert outcome.gpu_s == pytest.approx(2 * outcome.wall_s)
    assert gang.board.endpoint == ""  # a warm world has met already
    assert gang.processes() == processes
    assert blamed_node(gang.board.members()) is None


def test_a_refusal_leaves_the_world_warm(gang: Gang) -> None:
    processes = warmed(gang)
    failure = gang.run(SHORT.model_copy(update={"group_size": 3}), warm=True).failure
    assert failure is not None
    assert failure.kind is FailureKind.ILLEGAL
    assert "must divide the 2 ranks" in failure.message
    assert blamed_node(gang.board.members()) is None
    assert gang.processes() == processes


def test_a_step_across_nodes(gang: Gang) -> None:
    model = ModelSpec.from_data({"name": "small", **SHAPE, "hidden": 64, "ffn": 128, "vocab": 256})
    workload = Workload.from_data({"seq_len": 32, "global_batch": 4, "dtype": "fp32"})
    request = StepRequest(model=model, workload=workload, plan=Plan(pp=2), warmup_steps=2, min_steps=1, max_steps=2)
    outcome = gang.run(request)
    assert outcome.failure is None
    (reading,) = outcome.readings
    assert isinstance(reading, StepReading)
    assert [(rank.rank, rank.stage) for rank in reading.ranks] == [(0, 0), (1, 1)]


def test_memory_that_runs_out_on_one_node_is_the_cause(gang: Gang) -> None:
    # As in test_launch_prober: activations of the last stage do not fit.
    model = ModelSpec.from_data({"name": "wide", **SHAPE, "hidden": 256, "ffn": 1024, "vocab": 65536})
    workload = Workload.from_data({"seq_len": 512, "global_batch": 8, "dtype": "fp32"})
    processes = warmed(gang)
    outcome = gang.run(StepRequest(model=model, workload=workload, plan=Plan(pp=2, micro_batch=4)), warm=True)
    failure = outcome.failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.stage) == (FailureKind.OOM, 1, 1)
    assert "node-b" in failure.message
    assert "[Stage 1] failed to run forward" in failure.log_tail
    assert blamed_node(gang.board.members()) is None
    # Its peer was told, or saw the connection close.
    assert gang.board.reports[0].failure in {FailureKind.OOM, FailureKind.COMMUNICATION}
    assert_gone(processes, 0)


def test_kill_9_of_a_rank(gang: Gang) -> None:
    failure = struck(gang, signal.SIGKILL, rank=1).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.CRASH, 1)
    assert failure.message == "node node-b: rank 1 was killed by SIGKILL"
    assert failure.log_path is not None
    assert Path(failure.log_path).name == "rank-1.log"
    assert blamed_node(gang.board.members()) == "node-b"


def test_a_stopped_rank_is_a_hang(gang: Gang) -> None:
    failure = struck(gang, signal.SIGSTOP, rank=1, deadline_s=3).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.HANG, 1)
    assert failure.message.startswith("node node-b: rank 1 is stopped")
    assert blamed_node(gang.board.members()) == "node-b"


def test_cancelled(gang: Gang) -> None:
    processes = warmed(gang)

    def cancel() -> None:
        gang.board.stop = stop(FailureKind.CANCELLED)

    failure = gang.run(ENDLESS, warm=True, on_progress=cancel).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.CANCELLED, "told cancelled")
    assert_gone(processes, 0)


def test_a_world_that_one_node_has_lost(gang: Gang) -> None:
    processes = warmed(gang)
    gang.nodes[1].end()
    failure = gang.run(ENDLESS, warm=True).failure
    assert failure is not None
    assert failure.kind is FailureKind.LOST
    assert failure.message == f"node node-b: this node does not hold the ranks of world world-{gang.worlds} any more"
    assert blamed_node(gang.board.members()) == "node-b"
    assert_gone(processes, 0)


def test_a_node_that_never_comes(gang: Gang) -> None:
    gang.worlds += 1
    for index in (0, 1):
        gang.board = board = type(gang.board)()
        board.stop = stop(FailureKind.LOST)
        gang.run_one(index, ENDLESS)
        outcome = merged_outcome(ENDLESS, gang.cluster, board.members())
        assert outcome.failure is not None
        assert outcome.failure.kind is FailureKind.LOST
        assert outcome.failure.message == f"node {NAMES[1 - index]}: the node was lost before it reported"
        assert gang.processes() == []


def test_a_first_node_that_never_says_where_to_meet(gang: Gang) -> None:
    gang.worlds += 1
    gang.board = type(gang.board)()
    gang.run_one(1, SHORT, deadline_s=1)
    report = gang.board.reports[1]
    assert (report.failure, report.ranks) == (FailureKind.HANG, ())
    assert "first node did not say" in report.message
    assert gang.processes() == []


def test_nobody_to_ask_is_no_reason_to_stop(gang: Gang) -> None:
    """The database is away for the first answer to each question, and once the ranks are at work."""
    asked: list[str] = []
    board = type(gang.board)()
    gang.board = board
    order, publish = board.order, board.publish

    def away(index: int, progress: ProbeProgress | None = None) -> MemberOrder:
        asked.append(f"order {index}")
        if asked.count(f"order {index}") == 1 or progress is not None:
            raise OSError("the database is away")
        return order(index, progress)

    def publish_later(endpoint: str) -> None:
        asked.append("publish")
        if asked.count("publish") == 1:
            raise OSError("the database is away")
        publish(endpoint)

    board.order, board.publish = away, publish_later  # type: ignore[method-assign]
    gang.worlds += 1
    outcome = gang.run_board(SHORT)
    assert outcome.failure is None
    assert asked.count("publish") == 2
    assert {"order 0", "order 1"} <= set(asked)


def test_a_rank_that_died_between_probes(gang: Gang) -> None:
    processes = warmed(gang)
    processes[0].kill()
    os.waitid(os.P_PID, processes[0].pid, os.WEXITED | os.WNOWAIT)  # it has ended; its node has not looked yet
    failure = gang.run(SHORT, warm=True).failure
    assert failure is not None
    assert failure.kind is FailureKind.LOST
    assert blamed_node(gang.board.members()) == "node-a"
    assert_gone(processes, 0)


@pytest.mark.usefixtures("_rank_environment")
def test_an_address_that_is_not_the_nodes(tmp_path: Path) -> None:
    node = NodeRanks(log_root=tmp_path, interface="lo", address="192.0.2.1")  # reserved for documentation, RFC 5737
    with Gang(gang_cluster(nodes=1), [node]) as gang:
        failure = gang.run(SHORT).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.UNAVAILABLE, 0)
    assert "rank 0 cannot listen on '192.0.2.1'" in failure.message


def test_shares_that_cannot_be() -> None:
    with pytest.raises(InputError, match="numbered 0 to 1"):
        WorldShare(world_id="world", index=2, cluster=gang_cluster())
    with pytest.raises(InputError, match="a name of its own"):
        WorldShare(world_id="", index=0, cluster=gang_cluster())
