"""The cold mode: one trial on ranks that torchrun starts for it alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import ProberError
from autotune.specs import ClusterSpec, FailureKind
from probes.launch.channel import Channel, Message
from probes.launch.failures import RankFailure, death_of
from probes.launch.gathering import Gathered, gather
from probes.launch.placement import Placement, dying_with_parent, rank_environment
from probes.launch.pool import StartError, rank_config, rank_log

_DEATH_S = 10.0
_HELLO_S = 5.0
TORCHRUN_LOG = "torchrun.log"
# torchrun's report on a failed rank: "rank : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 42)".
_EXIT = re.compile(r"rank\s+: (\d+) .*\n\s*exitcode\s+: (-?\d+)")


@dataclass(slots=True)
class _ColdRank:
    """The launcher's side of one rank that torchrun started. `pidfd` names its process without a race."""

    rank: int
    pid: int
    pidfd: int
    channel: Channel
    log_path: Path

    def death(self) -> str:
        """torchrun, not this process, learns how it ended."""
        self.kill()
        return "ended without an answer"

    def kill(self) -> None:
        """SIGKILLs the rank."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self, deadline: float) -> bool:
        """Waits until the rank is gone; False if it is not by the deadline."""
        gone = bool(select.select([self.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0])
        os.close(self.pidfd)
        self.channel.close()
        return gone


class ColdTrial:
    """One torchrun with its ranks, from start to end; a context manager that leaves no process behind.

    Ranks connect to a socket in a directory of this trial's own and say which rank they are: an answer can only be
    this trial's, and that rank's.
    """

    def __init__(self, cluster: ClusterSpec, ranks: int, log_dir: Path) -> None:
        self._cluster, self._ranks, self._log_dir = cluster, ranks, log_dir
        self._links: dict[int, _ColdRank] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="autotune-cold-"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._directory / "launcher"))
        self._listener.listen(ranks)
        self._process = self._start()

    def run(
        self,
        module: str,
        request: dict[str, Any],
        *,
        deadline: float,
        on_note: Callable[[int, Message], None] | None = None,
    ) -> Gathered:
        """Runs `module.run(request, context)` once on every rank. `on_note` also sees each rank's "ready".

        Raises:
            StartError: the ranks did not come up.
        """
        self._accept(deadline)
        for link in self._links.values():
            link.channel.send({"module": module, "request": request, "log_path": str(link.log_path)})
        gathered = gather(self._links, deadline, on_note)
        if gathered.failure is not None and gathered.failure.kind is FailureKind.CRASH and not gathered.all_answered:
            self._explain(gathered)
        return gathered

    @property
    def pids(self) -> list[int]:
        """torchrun's process, then the ranks' by rank."""
        return [self._process.pid, *(link.pid for _, link in sorted(self._links.items()))]

    def __enter__(self) -> ColdTrial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links.values():
            link.kill()
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_DEATH_S)
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        deadline = time.monotonic() + _DEATH_S
        alive = [link.pid for link in self._links.values() if not link.close(deadline)]
        if alive:
            raise ProberError(f"rank processes {alive} are still there {_DEATH_S:.0f} s after SIGKILL")

    def _start(self) -> subprocess.Popen[bytes]:
        kind = self._cluster.device.kind
        config = rank_config(self._cluster, self._ranks, 0, self._log_dir, "").to_data()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={self._ranks}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        torchrun += ["--max-restarts=0", "-m", "probes.launch.cold", str(self._directory / "launcher")]
        with (self._log_dir / TORCHRUN_LOG).open("wb") as log:
            return subprocess.Popen(
                dying_with_parent([*torchrun, json.dumps(config)], kind),
                env=rank_environment(kind, self._ranks, Placement()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _accept(self, deadline: float) -> None:
        """Waits until every rank has connected."""
        torchrun_fd = os.pidfd_open(self._process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(torchrun_fd, selectors.EVENT_READ)
                while len(self._links) < self._ranks:
                    ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                    if torchrun_fd in ready:
                        raise self._start_error(f"torchrun {death_of(self._process.wait())}")
                    if not ready:
                        raise self._start_error(f"{len(self._links)} of {self._ranks} ranks were up at the deadline")
                    self._welcome()
        finally:
            os.close(torchrun_fd)

    def _welcome(self) -> None:
        stream, _ = self._listener.accept()
        stream.settimeout(_HELLO_S)
        channel = Channel(stream)
        messages = channel.receive()
        if not messages:
            return  # it died while it connected: torchrun will end and say so
        stream.settimeout(None)
        rank, pid = messages[0]["rank"], messages[0]["pid"]
        log_path = rank_log(self._log_dir, rank)
        with contextlib.suppress(ProcessLookupError):  # as above
            pidfd = os.pidfd_open(pid)
            self._links[rank] = _ColdRank(rank=rank, pid=pid, pidfd=pidfd, channel=channel, log_path=log_path)

    def _start_error(self, message: str) -> StartError:
        return StartError(RankFailure(rank=None, kind=FailureKind.UNAVAILABLE, message=message), self._log_dir)

    def _explain(self, gathered: Gathered) -> None:
        """Adds what torchrun knows: how ranks ended, or that it was torchrun itself that was killed."""
        try:
            status = self._process.wait(_HELLO_S)
        except subprocess.TimeoutExpired:
            return
        if status < 0:
            gathered.failures = {
                -1: RankFailure(rank=None, kind=FailureKind.CRASH, message=f"torchrun {death_of(status)}")
            }
            return
        text = (self._log_dir / TORCHRUN_LOG).read_text(encoding="utf-8", errors="replace")
        for rank, exit_code in _EXIT.findall(text):
            known = gathered.failures.get(int(rank))
            if known is not None and known.kind is FailureKind.CRASH:
                message = f"rank {rank} {death_of(int(exit_code))}"
                gathered.failures[int(rank)] = RankFailure(rank=int(rank), kind=known.kind, message=message)
