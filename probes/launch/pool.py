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
from probes.launch.failures import death_of
from probes.launch.gathering import Gathered, Poll, gather
from probes.launch.placement import Placement, RankConfig, dying_with_parent, rank_environment

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
    """The warm ranks of one cluster's devices on this machine: a whole world, or this machine's share of one.

    Ranks live until `kill` or `close`, or until this process ends, however it ends. Not for use by several threads at
    the same time.

    Args:
        cluster: its device kind, memory and devices a node decide what each rank claims.
        ranks: how many on this machine.
        placements: one a rank, for ranks that are not plainly on this machine.
        first_rank: the number of the first of them in its world.
        world_size: the ranks of the world on all machines; None means these.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        ranks: int,
        *,
        placements: Sequence[Placement] | None = None,
        first_rank: int = 0,
        world_size: int | None = None,
    ) -> None:
        if placements is not None and len(placements) != ranks:
            raise InputError("placements", len(placements), f"one for each of the {ranks} ranks is needed")
        self._cluster, self._ranks = cluster, ranks
        self._first_rank, self._world_size = first_rank, world_size or ranks
        self._placements = list(placements) if placements is not None else [Placement()] * ranks
        self._links: dict[int, _WarmRank] = {}
        self._baseline_bytes: dict[tuple[str, int], int] = {}
        # The parent-death signal comes from the thread that started a process: this one lives as long as the pool.
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-keeper")

    @property
    def pids(self) -> list[int]:
        """The processes of the living ranks, by rank; empty when the pool is cold."""
        return [link.pid for _, link in sorted(self._links.items())]

    @property
    def lives(self) -> bool:
        """Whether the ranks are started and none has ended."""
        return bool(self._links) and all(link.process.poll() is None for link in self._links.values())

    def form(
        self,
        *,
        deadline: float,
        log_dir: Path,
        on_store: Callable[[str, int], None] | None = None,
        poll: Poll | None = None,
    ) -> Gathered:
        """Starts the ranks again; they are kept only if all of them joined their world.

        Where rank 0 is among them, it hosts the world's store, and `on_store` is called with host and port. Where it is
        not, `poll` (see gathering.gather) calls `join` once it knows them.
        """
        self.kill()

        def introduce(_: int, message: Message) -> None:
            if message["type"] == "store":
                host, port = self._placements[0].address, message["port"]
                self.join(host, port)
                if on_store is not None:
                    on_store(host, port)

        try:
            for rank in range(self._first_rank, self._first_rank + self._ranks):
                self._links[rank] = self._keeper.submit(self._spawn_one, rank, log_dir).result()
            gathered = gather(self._links, deadline, introduce, poll)
        except BaseException:
            self.kill()
            raise
        if gathered.failures or gathered.stop is not None or not gathered.all_answered:
            self.kill()
        return gathered

    def join(self, host: str, port: int) -> None:
        """Tells ranks that are being started where their world's store is."""
        for rank, link in self._links.items():
            if rank != 0:
                link.channel.send({"type": "join", "host": host, "port": port})

    def run(
        self,
        module: str,
        request: dict[str, Any],
        *,
        deadline: float,
        log_dir: Path,
        on_note: Callable[[int, Message], None] | None = None,
        poll: Poll | None = None,
    ) -> Gathered:
        """Runs `module.run(request, context)` on every started rank; rank i writes to `log_dir`/rank-i.log.

        The ranks stay warm unless one of them failed otherwise than by refusing the request or holds more memory
        than it did, or `poll` (see gathering.gather) said to stop for something other than a refusal.
        """
        try:
            for link in self._links.values():
                link.log_path = rank_log(log_dir, link.rank)
                link.channel.send({"module": module, "request": request, "log_path": str(link.log_path)})
            gathered = gather(self._links, deadline, on_note, poll)
        except BaseException:
            self.kill()
            raise
        refused = all(failure.kind is FailureKind.ILLEGAL for failure in gathered.failures.values())
        # Ranks of other machines may have refused first, and had this told to stop while its own did.
        in_step = gathered.stop is None or gathered.stop.kind is FailureKind.ILLEGAL
        if not (refused and in_step and gathered.all_answered) or self._drifted(module, gathered):
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

    def _spawn_one(self, rank: int, log_dir: Path) -> _WarmRank:
        ours, theirs = socket.socketpair()
        placement = self._placements[rank - self._first_rank]
        config = rank_config(self._cluster, self._world_size, rank, log_dir, self._placements[0].address)
        command = [sys.executable, "-m", "probes.launch.rank", str(theirs.fileno()), json.dumps(config.to_data())]
        with theirs:
            process = subprocess.Popen(
                dying_with_parent([*placement.command_prefix, *command], self._cluster.device.kind),
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


def rank_log(log_dir: Path, rank: int) -> Path:
    """Where a rank writes."""
    return log_dir / f"rank-{rank}.log"


def rank_config(cluster: ClusterSpec, world_size: int, rank: int, log_dir: Path, store_host: str) -> RankConfig:
    """What rank `rank` of `world_size` is told when it starts."""
    on_cpu = cluster.device.kind is DeviceKind.CPU
    return RankConfig(
        rank=rank,
        world_size=world_size,
        local_rank=rank % cluster.gpus_per_node,
        kind=cluster.device.kind,
        memory_bytes=cluster.device.memory_bytes if on_cpu else None,
        log_path=str(rank_log(log_dir, rank)),
        store_host=store_host,
    )
