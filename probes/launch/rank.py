"""A warm rank: `python -m probes.launch.rank DESCRIPTOR CONFIG`, started by RankPool and by nobody else.

It imports torch and joins the default group once, then answers requests until it is killed or the launcher is gone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from queue import SimpleQueue
from typing import Any

from autotune.errors import ProberError
from autotune.specs import DeviceKind
from probes.launch.channel import Channel, Message
from probes.launch.service import Rank, RankConfig, failure_message, listen, log_to, spare_outputs


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
        rank = Rank(config, channel, lambda device, backend: _join(config, channel, inbox, device, backend))
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


if __name__ == "__main__":
    main(sys.argv[1:])
