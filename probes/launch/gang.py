"""NodeRanks: the warm ranks that one node contributes to a world, or that are all of it. Loads no torch."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import InputError, ProberError
from autotune.ports.store import OnProgress
from autotune.specs import ClusterSpec, FailureKind, Fingerprint, MemberReport, ProbeRequest, RankReport, StepRequest
from autotune.specs.command import CommandBook
from probes.launch.failures import RankFailure, tail_of
from probes.launch.gathering import Gathered, Progress
from probes.launch.merging import MODULES
from probes.launch.orders import Order, Orders, go_on
from probes.launch.placement import Placement
from probes.launch.pool import RankPool, rank_log
from probes.program.reading import ReadLog, no_logs

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ANSWER_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldShare:
    """A node's share of a world: the ranks index * gpus_per_node and on, of the gang that `cluster` describes.

    `warm` says that the world was formed before, on these nodes in this order.

    Raises:
        InputError: no such node in the gang, or a world without a name.
    """

    world_id: str
    index: int
    cluster: ClusterSpec
    warm: bool = False

    def __post_init__(self) -> None:
        if not self.world_id:
            raise InputError("world.world_id", self.world_id, "every world has a name of its own")
        if not 0 <= self.index < self.cluster.nodes:
            allowed = f"the nodes of this gang are numbered 0 to {self.cluster.nodes - 1}"
            raise InputError("world.index", self.index, allowed)


class NodeRanks:
    """This node's ranks, kept warm from one probe to the next of the same world.

    Ranks end with `end` or `close`, when a probe fails, when another world is asked for, or when this process ends,
    however it ends. Make it in the process that runs it; not for use by several threads at the same time.

    Args:
        log_root: each run's ranks write into a directory of their own below it. Where that cannot be made or filled,
            they run all the same, without logs.
        interface: the network interface for gloo and NCCL; None leaves it to the environment, and to `Placement`.
        address: where the other nodes reach this one.
        command_prefix: goes before each rank's command (`("ip", "netns", "exec", "name")`).
        placements: one a rank, instead of all that: for ranks that are not plainly on this machine.
        commands: the programs of its user or operator that it may run, by name and digest.
        read_log: reads the logs of frameworks.
    """

    def __init__(
        self,
        *,
        log_root: Path,
        interface: str | None = None,
        address: str = "127.0.0.1",
        command_prefix: tuple[str, ...] = (),
        placements: Sequence[Placement] | None = None,
        commands: CommandBook = CommandBook(),
        read_log: ReadLog | None = None,
    ) -> None:
        self._commands, self._read_log = commands, read_log
        environment = dict.fromkeys(INTERFACE_VARIABLES, interface) if interface is not None else {}
        self._placement = Placement(command_prefix=command_prefix, environment=environment, address=address)
        self._placements = placements
        # Only named here; ranks make it, so that a full disk fails nothing.
        self._log_root = log_root / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count(1)
        self._pool: RankPool | None = None
        self._held = ""

    @property
    def world_id(self) -> str:
        """The world that the ranks are warm for; empty without any, and once one of them has ended."""
        return self._held if self._pool is not None and self._pool.lives else ""

    @property
    def pids(self) -> list[int]:
        """The processes of this node's ranks, by rank."""
        return self._pool.pids if self._pool is not None else []

    def run(
        self,
        share: WorldShare,
        request: ProbeRequest,
        *,
        deadline_s: float,
        publish: Callable[[str], object],
        order: Order,
        on_progress: OnProgress | None = None,
    ) -> MemberReport:
        """Runs this node's share of a probe to its end, within `deadline_s` plus a few seconds to kill ranks.

        Ranks are started unless they are warm for exactly this world; if they should be and are not, the report is LOST
        at once. The first node's rank 0 hosts the world's store on the node's address, and `publish` is called with
        host:port; on the other nodes `order` is called every 0.2 s until it carries that, and every second afterwards.

        Who decides about the end: the ranks by answering or failing; an order to stop (they are killed at once if it
        says CANCELLED, else after a grace in which they may tell a cause of their own); the deadline. While `order` or
        `publish` raise, nothing is known, and the deadline alone decides.

        A request for cold ranks gets fresh ones, which do not stay. Where the workload names a program, that runs, and
        the ranks are ended before: nothing of theirs is in its way.

        `order` hears of progress when it is asked, `on_progress` at once. Never raises for what happens to ranks; what
        `on_progress` raises, and an interrupt, ends them and passes.
        """
        log_dir = self._next_log_dir(request.kind)
        orders = Orders(order, publish, on_progress)
        if isinstance(request, StepRequest) and request.workload.command:
            return self._run_program(share, request, time.monotonic() + deadline_s, log_dir, orders)
        watch = Progress(orders.tell)
        cold = isinstance(request, StepRequest) and request.cold
        try:
            if cold:
                self.end()
            module, data = MODULES[request.kind], request.to_data()
            gathered = self._run(share, module, data, watch.start_s + deadline_s, log_dir, orders, watch)
            if cold:
                self.end()
        except (ProberError, OSError) as error:  # no process can be started, or the kernel does not let one go
            gathered = _failed(FailureKind.UNAVAILABLE, f"ranks could not be started or ended: {error}")
        wall_s = time.monotonic() - watch.start_s
        return _report(gathered, log_dir).model_copy(
            update={
                "kept_warm": self.world_id == share.world_id,
                "setup_s": wall_s if watch.ready_s is None else watch.ready_s,
                "wall_s": wall_s,
            }
        )

    def _run_program(
        self, share: WorldShare, request: StepRequest, deadline: float, log_dir: Path, orders: Orders
    ) -> MemberReport:
        from probes.program.run import ProgramRun  # it stands on parts of this package

        start_s = time.monotonic()
        try:
            self.end()
            command = self._commands(request.workload.command)
        except InputError as error:
            wall_s = time.monotonic() - start_s
            return MemberReport(failure=FailureKind.ILLEGAL, message=str(error), wall_s=wall_s)
        except ProberError as error:
            return MemberReport(failure=FailureKind.UNAVAILABLE, message=str(error))
        program = ProgramRun(
            command=command,
            index=share.index,
            cluster=share.cluster,
            request=request,
            placement=self._placement,
            log_dir=log_dir,
            read_log=self._read_log or no_logs,
        )
        return program.run(deadline, orders)

    def fingerprint(self, cluster: ClusterSpec) -> Fingerprint:
        """The environment of the first rank, in a world of this node alone. Raises ProberError as `ask` does."""
        return Fingerprint.from_data(self.ask(cluster, "probes.fingerprint", {"kind": "fingerprint"})[0])

    def ask(self, cluster: ClusterSpec, module: str, request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """What `module.run(request, context)` gives on each rank, in a world of this node alone.

        That is the world that it holds, or a new one, whose ranks stay.

        Raises:
            ProberError: ranks cannot be started, or do not answer.
        """
        share = WorldShare(world_id=self.world_id or uuid.uuid4().hex, index=0, cluster=cluster)
        log_dir, deadline = self._next_log_dir(module.rpartition(".")[2]), time.monotonic() + ANSWER_S
        orders, watch = Orders(go_on, lambda _: None), Progress(None)
        try:
            gathered = self._run(share, module, request, deadline, log_dir, orders, watch)
        except OSError as error:
            raise ProberError(f"ranks could not be started: {error}") from error
        if gathered.failure is not None:
            what = "ranks could not be started" if watch.ready_s is None else f"{module} failed"
            raise ProberError(f"{what}: {gathered.failure.message} (log: {log_dir})")
        return gathered.reports

    def end(self) -> None:
        """Ends the ranks and forgets their world. Raises ProberError if the kernel does not let one go."""
        pool, self._pool, self._held = self._pool, None, ""
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """Ends the ranks. May be called twice."""
        self.end()

    def __enter__(self) -> NodeRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        share: WorldShare,
        module: str,
        data: dict[str, Any],
        deadline: float,
        log_dir: Path,
        orders: Orders,
        watch: Progress,
    ) -> Gathered:
        pool = self._pool if self.world_id == share.world_id else None
        if pool is None:
            if share.warm:
                if not self.world_id:
                    self.end()  # what is left of a world that lost a rank
                return _failed(
                    FailureKind.LOST, f"this node does not hold the ranks of world {share.world_id} any more"
                )
            pool = self._renew(share)
            if share.index:
                orders.await_endpoint(pool.join)
            on_store = orders.host if share.cluster.nodes > 1 else None
            formed = pool.form(deadline=deadline, log_dir=log_dir, on_store=on_store, poll=orders.poll)
            if not pool.pids:
                return _as_start(formed, orders)
        return pool.run(module, data, deadline=deadline, log_dir=log_dir, on_note=watch.note, poll=orders.poll)

    def _next_log_dir(self, kind: str) -> Path:
        return self._log_root / f"{next(self._numbers):04d}-{kind}"

    def _renew(self, share: WorldShare) -> RankPool:
        """The ranks of a new world, not started yet, in place of those of the last one."""
        self.end()
        cluster, ranks = share.cluster, share.cluster.gpus_per_node
        self._pool = RankPool(
            cluster,
            ranks,
            placements=self._placements or [self._placement] * ranks,
            first_rank=share.index * ranks,
            world_size=cluster.devices,
        )
        self._held = share.world_id
        return self._pool


def _failed(kind: FailureKind, message: str) -> Gathered:
    """A failure of the node, whatever its ranks."""
    return Gathered(failures={-1: RankFailure(rank=None, kind=kind, message=message)})


def _as_start(formed: Gathered, orders: Orders) -> Gathered:
    """What came of a start that failed. No plan was run yet, so memory that runs out there says nothing about one."""
    kinds = {failure.kind for failure in formed.failures.values()}
    if orders.awaits_endpoint and formed.stop is None and kinds == {FailureKind.HANG}:
        return _failed(FailureKind.HANG, "the gang's first node did not say by the deadline where its ranks meet")
    formed.reports.clear()
    for rank, failure in formed.failures.items():
        if failure.kind is FailureKind.OOM:
            formed.failures[rank] = replace(failure, kind=FailureKind.UNAVAILABLE)
    return formed


def _report(gathered: Gathered, log_dir: Path) -> MemberReport:
    """The report but for its times. A cause that the node was told counts before what its ranks saw of it."""
    cause = gathered.stop or gathered.failure
    failures = [
        _rank_failure(failure, failure.rank, log_dir)
        for failure in gathered.failures.values()
        if failure.rank is not None
    ]
    reports = [RankReport(rank=rank, report=report) for rank, report in sorted(gathered.reports.items())]
    return MemberReport(
        ranks=(*failures, *reports),
        failure=cause.kind if cause is not None else None,
        message=cause.message if cause is not None else "",
        ordered=gathered.stop is not None,
        log_dir=str(log_dir) if log_dir.exists() else "",
    )


def _rank_failure(failure: RankFailure, rank: int, log_dir: Path) -> RankReport:
    log_path = rank_log(log_dir, rank)
    return RankReport(
        rank=rank,
        failure=failure.kind,
        message=failure.message,
        log_path=str(log_path) if log_path.exists() else None,
        log_tail=tail_of(log_path),
        stopped=failure.stopped,
    )
