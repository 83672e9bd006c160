"""A warm rank: `python -m probes.launch.rank DESCRIPTOR CONFIG`, started by RankPool and by nobody else.

It imports torch and joins the default group once, then answers requests until it is killed or the launcher is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from autotune.errors import ProberError
from autotune.specs import CollectiveRequest, DeviceKind, LayerRequest, ProbeProgress, Spec, StepRequest
from probes.launch.channel import Channel, Message
from probes.launch.failures import cause_of, kind_of, message_of
from probes.launch.placement import RankConfig

_REQUESTS: dict[str, type[Spec]] = {"collective": CollectiveRequest, "layer": LayerRequest, "step": StepRequest}


def main(arguments: list[str]) -> None:
    """Serves until the launcher ends this process."""
    descriptor = int(arguments[0])
    config = RankConfig.from_data(json.loads(arguments[1]))
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    spare_outputs()
    log_to(config.log_path)
    inbox = listen(channel)
    try:
        rank = Rank(config, channel, inbox)
    except Exception as error:  # noqa: BLE001 - the edge of the process: recorded in the log and answered
        traceback.print_exc()
        channel.send(failure_message(error))
    else:
        rank.greet()
        while True:
            rank.serve(inbox.get())
    inbox.get()  # stay until the launcher has read the failure and kills this rank


def _join(config: RankConfig, channel: Channel, inbox: SimpleQueue[Message], device: Any, backend: str) -> None:
    """Initialises the default group over a store that rank 0 hosts on a port the kernel chose."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if config.rank == 0:
        listener = _listener(config.store_host)
        port = listener.getsockname()[1]
        store = TCPStore(
            config.store_host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        channel.send({"type": "store", "port": store.port})
    else:
        meeting = inbox.get()
        store = TCPStore(meeting["host"], meeting["port"], is_master=False)
    device_id = None if config.kind is DeviceKind.CPU else torch.device(device)
    dist.init_process_group(backend, store=store, rank=config.rank, world_size=config.world_size, device_id=device_id)


def _listener(host: str) -> socket.socket:
    """A socket on this address alone: torch's own listens on every network, and a store asks nobody who they are."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise ProberError(f"rank 0 cannot listen on {host!r}: {error}") from error


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

    def __init__(self, config: RankConfig, channel: Channel, inbox: SimpleQueue[Message]) -> None:
        """Imports torch and joins the default group; on other ranks than 0, once the launcher says where it meets.

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
        _join(config, channel, inbox, device, backend)
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


if __name__ == "__main__":
    main(sys.argv[1:])
