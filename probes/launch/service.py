"""What a rank does for the launcher: join the world, run probes, answer. Imports torch."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from autotune.errors import ProberError
from autotune.specs import CollectiveRequest, DeviceKind, LayerRequest, ProbeProgress, Spec, StepRequest
from probes.launch.channel import Channel, Message
from probes.launch.failures import cause_of, kind_of, message_of

_REQUESTS: dict[str, type[Spec]] = {"collective": CollectiveRequest, "layer": LayerRequest, "step": StepRequest}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank is told when it starts. `memory_bytes` is the CPU device's memory, None elsewhere."""

    rank: int
    world_size: int
    local_rank: int
    kind: DeviceKind
    memory_bytes: int | None
    log_path: str
    store_host: str = ""

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-able data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankConfig:
        """The reverse of `to_data` after a trip through JSON."""
        return cls(**{**data, "kind": DeviceKind(data["kind"])})


class _Output(io.FileIO):
    """A stream that drops what a full disk does not take: a log is not worth a measurement."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def spare_outputs() -> None:
    """Makes Python's stdout and stderr raise nothing when the disk of the log is full."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(number, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )


def log_to(path: str) -> None:
    """Sends this process's stdout and stderr, Python's and C's, to the end of a file; nowhere if it cannot be made."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def listen(channel: Channel) -> SimpleQueue[Message]:
    """Reads the launcher's messages in a thread; when the launcher is gone, kills this rank and its children.

    A second guard beside the parent-death signal: it also ends ranks whose launcher lives but has closed its end.
    """
    inbox: SimpleQueue[Message] = SimpleQueue()

    def read() -> None:
        while (messages := channel.receive()) is not None:
            for message in messages:
                inbox.put(message)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, name="launcher", daemon=True).start()
    # The launcher asks a hung rank for its Python stacks before it kills it.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    return inbox


class Rank:
    """One rank of an initialised default group, which serves requests."""

    def __init__(self, config: RankConfig, channel: Channel, join: Callable[[Any, str], None]) -> None:
        """Imports torch and calls `join(device, backend)` to initialise the default group.

        Raises:
            ProberError: no torch, or no such device.
        """
        try:
            import torch
        except ImportError as error:
            raise ProberError(f"ranks need torch: {error}") from error
        from probes.context import RankContext
        from probes.launch import memory

        self._channel = channel
        self._memory = memory
        device, backend = _device(config), "gloo" if config.kind is DeviceKind.CPU else "nccl"
        join(device, backend)
        _first_exchange(device)
        self._limit = memory.DataLimit(config.memory_bytes) if config.memory_bytes is not None else None
        self._context = RankContext(
            rank=config.rank,
            world_size=config.world_size,
            local_rank=config.local_rank,
            hostname=os.uname().nodename,
            device=torch.device(device),
            backend=backend,
            memory_limit_bytes=config.memory_bytes,
            emit=self._emit if config.rank == 0 else _emit_nothing,
        )

    def greet(self) -> None:
        """Answers the start of this rank, as if it were a request."""
        self._channel.send(
            {"type": "report", "report": {}, "held_bytes": self._memory.held_bytes(self._context.device)}
        )

    def serve(self, message: Message) -> None:
        """Runs one request to its answer, a report or a failure; says "ready" once the probe's module is loaded."""
        log_to(message["log_path"])
        try:
            report = self._run(message["module"], message["request"])
        except Exception as error:  # noqa: BLE001 - the edge of the process: recorded in the log and answered
            traceback.print_exc()
            self._channel.send(failure_message(error))
        else:
            held_bytes = self._memory.held_bytes(self._context.device)
            self._channel.send({"type": "report", "report": report, "held_bytes": held_bytes})
        sys.stdout.flush()

    def _run(self, module_name: str, data: dict[str, Any]) -> dict[str, Any]:
        before_bytes = self._memory.data_bytes()
        module = importlib.import_module(module_name)
        spec = _REQUESTS.get(data["kind"])
        request = spec.from_data(data) if spec is not None else data
        if self._limit is not None:
            self._limit.exempt(self._memory.data_bytes() - before_bytes)
        self._channel.send({"type": "ready"})
        with self._limit or contextlib.nullcontext():
            report: dict[str, Any] = module.run(request, self._context)
        return report

    def _emit(self, progress: ProbeProgress) -> None:
        self._channel.send({"type": "progress", "progress": progress.to_data()})


def failure_message(error: BaseException) -> Message:
    """The answer for an exception."""
    error = cause_of(error)
    return {"type": "failure", "kind": kind_of(error), "message": message_of(error)}


def _emit_nothing(_: ProbeProgress) -> None:
    """Progress comes from rank 0 only."""


def _device(config: RankConfig) -> str:
    """Claims the rank's device and names it. Raises ProberError if there is none."""
    import torch

    if config.kind is DeviceKind.CPU:
        return "cpu"
    found = torch.cuda.device_count()
    if config.local_rank >= found:
        raise ProberError(f"rank {config.rank} needs {config.kind} device {config.local_rank}, torch sees {found}")
    torch.cuda.set_device(config.local_rank)
    return f"cuda:{config.local_rank}"


def _first_exchange(device: str) -> None:
    """One all-reduce: connections and communicators are made now, not in the first measurement."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device=device))
    if device != "cpu":
        torch.cuda.synchronize()
