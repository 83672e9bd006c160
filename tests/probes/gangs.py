"""A gang of nodes in one process, with a thread each, and the board that a control plane keeps for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from types import TracebackType

import psutil
from local_ranks import AMPLE_S, cpu_cluster

from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveRequest,
    FailureKind,
    JobMember,
    MemberOrder,
    MemberReport,
    MemberState,
    ProbeOutcome,
    ProbeProgress,
    ProbeRequest,
)
from probes.launch import NodeRanks, WorldShare
from probes.launch.merging import merged_outcome

SHORT = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024, 4096), iterations=3)
# Far longer than any test: it ends because somebody ends it.
ENDLESS = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,), iterations=10**9)
NAMES = ("node-a", "node-b")


def gang_cluster(gpus_per_node: int = 1, nodes: int = 2) -> ClusterSpec:
    """`nodes` of this machine's CPU ranks."""
    inter = {"name": "veth"} if nodes > 1 else None
    return ClusterSpec.from_data(cpu_cluster(gpus_per_node).to_data() | {"nodes": nodes, "inter": inter})


class Board:
    """What the members of one job tell and are told, by the rules of FleetStore.renew_member."""

    def __init__(self, on_progress: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self.endpoint = ""
        self.reports: dict[int, MemberReport] = {}
        self.stop: MemberOrder | None = None
        self.seen: list[ProbeProgress] = []

    def publish(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def order(self, index: int, progress: ProbeProgress | None = None) -> MemberOrder:
        with self._lock:
            if progress is not None:
                if not self.seen and self._on_progress is not None:
                    self._on_progress()
                self.seen.append(progress)
            if self.stop is not None:
                return self.stop
            for other, report in self.reports.items():
                if other != index and any(rank.report and rank.report.get("step_times_s") for rank in report.ranks):
                    return MemberOrder(go_on=False, measured=True, reason=f"{NAMES[other]} knows the speed")
                if other != index and report.failure is not None:
                    return MemberOrder(go_on=False, failure=report.failure, reason=f"{NAMES[other]}: {report.message}")
            return MemberOrder(go_on=True, endpoint=self.endpoint)

    def members(self, nodes: int = 2) -> list[JobMember]:
        """In reverse, because nothing may hang on the order."""
        return [member(index, self.reports.get(index)) for index in reversed(range(nodes))]


def member(index: int, report: MemberReport | None) -> JobMember:
    """A member that reported, or that was lost."""
    state = MemberState.REPORTED if report is not None else MemberState.LOST
    now = datetime.now(UTC)
    return JobMember(node=NAMES[index], index=index, address="", state=state, expires_at=now, report=report)


def stop(kind: FailureKind) -> MemberOrder:
    """The order to stop."""
    return MemberOrder(go_on=False, failure=kind, reason=f"told {kind}")


class Gang:
    """Nodes with warm ranks; a context manager that checks that none of their processes is left."""

    def __init__(self, cluster: ClusterSpec, nodes: Sequence[NodeRanks]) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.worlds = 0
        self.board = Board()

    def run(
        self,
        request: ProbeRequest,
        *,
        deadline_s: float = AMPLE_S,
        warm: bool = False,
        on_progress: Callable[[], None] | None = None,
    ) -> ProbeOutcome:
        """One job on all nodes at once; `on_progress` is called once, when rank 0 first told progress."""
        self.worlds += not warm
        self.board = Board(on_progress)
        return self.run_board(request, deadline_s=deadline_s, warm=warm)

    def run_board(self, request: ProbeRequest, *, deadline_s: float = AMPLE_S, warm: bool = False) -> ProbeOutcome:
        """The same with the board as it is."""
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            runs = [threads.submit(self.run_one, index, request, deadline_s, warm) for index in range(len(self.nodes))]
        for run in runs:
            run.result()
        return merged_outcome(request, self.cluster, self.board.members(self.cluster.nodes))

    def run_one(self, index: int, request: ProbeRequest, deadline_s: float = AMPLE_S, warm: bool = False) -> None:
        """One node's share of a job."""
        share = WorldShare(world_id=f"world-{self.worlds}", index=index, cluster=self.cluster, warm=warm)
        board = self.board
        order = partial(board.order, index)
        board.reports[index] = self.nodes[index].run(
            share, request, deadline_s=deadline_s, publish=board.publish, order=order
        )

    @property
    def is_warm(self) -> bool:
        """Whether all nodes hold the ranks of the last world."""
        return {node.world_id for node in self.nodes} == {f"world-{self.worlds}"}

    def processes(self) -> list[psutil.Process]:
        """The ranks of all nodes, by rank."""
        return [psutil.Process(pid) for node in self.nodes for pid in node.pids]

    def __enter__(self) -> Gang:
        self._before = set(psutil.Process().children(recursive=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.close()
        assert set(psutil.Process().children(recursive=True)) <= self._before
