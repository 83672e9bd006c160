"""RankPool: warm rank processes, started once, killed as a group and started again when they cannot be trusted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InputError, ProberError
from autotune.specs import ClusterSpec, DeviceKind, FailureKind
from probes.launch.channel import Channel, Message
from probes.launch.failures import RankFailure, death_of
from probes.launch.gathering import Gathered, gather
from probes.launch.placement import Placement, leashed, rank_environment
from probes.launch.service import RankConfig

_DEATH_S = 10.0
# A pool whose ranks hold this much more than at their first answer is started again (the larger of the two).
_DRIFT_BYTES = 64 << 20
_DRIFT_SHARE = 0.1


@dataclass(slots=True)
class _WarmRank:
    """The launcher's side of one warm rank."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    log_path: Path

    @property
    def pid(self) -> int:
        """Its process, which leads its own session and process group."""
        return self.process.pid

    def death(self) -> str:
        """How it ended; a rank that only closed its channel is killed."""
        self.kill()
        return death_of(self.process.wait(_DEATH_S))

    def kill(self) -> None:
        """SIGKILLs the rank's whole process group. Not after it was reaped: the number may be another's by then."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class RankPool:
    """The warm ranks of one cluster's devices on this machine.

    Ranks live until `kill` or `close`, or until this process ends, however it ends. Not for use by several threads at
    the same time.

    Args:
        cluster: its device kind, memory and devices a node decide what each rank claims.
        ranks: how many.
        placements: one a rank, for ranks that are not plainly on this machine.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        ranks: int,
        *,
        placements: Sequence[Placement] | None = None,
    ) -> None:
        if placements is not None and len(placements) != ranks:
            raise InputError("placements", len(placements), f"one for each of the {ranks} ranks is needed")
        self._cluster, self._ranks = cluster, ranks
        self._placements = list(placements) if placements is not None else [Placement()] * ranks
        self._links: dict[int, _WarmRank] = {}
        self._baseline_bytes: dict[tuple[str, int], int] = {}
        # The parent-death signal comes from the thread that started a process: this one lives as long as the pool.
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-keeper")

    @property
    def pids(self) -> list[int]:
        """The processes of the living ranks, by rank; empty when the pool is cold."""
        return [link.pid for _, link in sorted(self._links.items())]

    def start(self, *, deadline: float, log_dir: Path) -> None:
        """Starts the ranks unless they all live. `deadline` is a time.monotonic.

        Raises:
            StartError: they are not ready in time, or one of them failed; none is left.
            ProberError: there is nothing to measure with (no torch, no device).
        """
        if self._links and all(link.process.poll() is None for link in self._links.values()):
            return
        self.kill()
        try:
            gathered = self._spawn(deadline, log_dir)
        except BaseException:
            self.kill()
            raise
        if gathered.failure is not None:
            self.kill()
            if gathered.failure.kind is FailureKind.UNAVAILABLE:
                raise ProberError(gathered.failure.message)
            raise StartError(gathered.failure, log_dir)

    def run(
        self,
        module: str,
        request: dict[str, Any],
        *,
        deadline: float,
        log_dir: Path,
        on_note: Callable[[int, Message], None] | None = None,
    ) -> Gathered:
        """Runs `module.run(request, context)` on every started rank; rank i writes to `log_dir`/rank-i.log.

        The ranks stay warm unless one of them failed otherwise than by refusing the request, or holds more memory
        than it did.
        """
        try:
            for link in self._links.values():
                link.log_path = rank_log(log_dir, link.rank)
                link.channel.send({"module": module, "request": request, "log_path": str(link.log_path)})
            gathered = gather(self._links, deadline, on_note)
        except BaseException:
            self.kill()
            raise
        refused = all(failure.kind is FailureKind.ILLEGAL for failure in gathered.failures.values())
        if not (refused and gathered.all_answered) or self._drifted(module, gathered):
            self.kill()
        return gathered

    def kill(self) -> None:
        """Kills all ranks and waits until they are gone. Raises ProberError if the kernel does not let one go."""
        links, self._links, self._baseline_bytes = self._links, {}, {}
        for link in links.values():
            link.kill()
        for link in links.values():
            link.channel.close()
            try:
                link.process.wait(_DEATH_S)
            except subprocess.TimeoutExpired:
                raise ProberError(f"rank process {link.pid} is still there {_DEATH_S:.0f} s after SIGKILL") from None

    def close(self) -> None:
        """Kills the ranks for good. May be called twice."""
        try:
            self.kill()
        finally:
            self._keeper.shutdown()

    def _spawn(self, deadline: float, log_dir: Path) -> Gathered:
        for rank in range(self._ranks):
            self._links[rank] = self._keeper.submit(self._spawn_one, rank, log_dir).result()

        def introduce(_: int, message: Message) -> None:
            if message["type"] == "store":
                for link in self._links.values():
                    if link.rank != 0:
                        link.channel.send({"type": "join", "port": message["port"]})

        return gather(self._links, deadline, introduce)

    def _spawn_one(self, rank: int, log_dir: Path) -> _WarmRank:
        ours, theirs = socket.socketpair()
        placement = self._placements[rank]
        config = rank_config(self._cluster, self._ranks, rank, log_dir, self._placements[0].address)
        command = [sys.executable, "-m", "probes.launch.rank", str(theirs.fileno()), json.dumps(config.to_data())]
        with theirs:
            process = subprocess.Popen(
                leashed([*placement.command_prefix, *command], self._cluster.device.kind),
                env=rank_environment(self._cluster.device.kind, self._ranks, placement),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return _WarmRank(rank=rank, process=process, channel=Channel(ours), log_path=Path(config.log_path))

    def _drifted(self, module: str, gathered: Gathered) -> bool:
        """Whether a rank holds more than after its first answer from this module, which loaded what is loaded once."""
        allowed = max(_DRIFT_BYTES, _DRIFT_SHARE * self._cluster.device.memory_bytes)
        return any(
            held_bytes - self._baseline_bytes.setdefault((module, rank), held_bytes) > allowed
            for rank, held_bytes in gathered.held_bytes.items()
        )


class StartError(Exception):
    """The ranks could not be started this time."""

    def __init__(self, failure: RankFailure, log_dir: Path) -> None:
        super().__init__(failure.message)
        self.failure, self.log_dir = failure, log_dir


def rank_log(log_dir: Path, rank: int) -> Path:
    """Where a rank writes."""
    return log_dir / f"rank-{rank}.log"


def rank_config(cluster: ClusterSpec, ranks: int, rank: int, log_dir: Path, store_host: str) -> RankConfig:
    """What rank `rank` of `ranks` is told when it starts."""
    on_cpu = cluster.device.kind is DeviceKind.CPU
    return RankConfig(
        rank=rank,
        world_size=ranks,
        local_rank=rank % cluster.gpus_per_node,
        kind=cluster.device.kind,
        memory_bytes=cluster.device.memory_bytes if on_cpu else None,
        log_path=str(rank_log(log_dir, rank)),
        store_host=store_host,
    )
