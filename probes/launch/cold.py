"""A cold rank: started by torchrun for one trial (see torchrun.py), `-m probes.launch.cold SOCKET_PATH CONFIG`."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from probes.launch.channel import Channel
from probes.launch.parent_death import PARENT_DEATH_PID, die_with_parent
from probes.launch.pool import rank_log
from probes.launch.service import Rank, RankConfig, failure_message, listen, log_to


def main(arguments: list[str]) -> None:
    """Serves one request, then waits to be killed: an early exit would make torchrun end the ranks still at work."""
    die_with_parent(int(os.environ[PARENT_DEATH_PID]))
    config = RankConfig.from_data(json.loads(arguments[1]))
    config = replace(config, rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]))
    config = replace(config, log_path=str(rank_log(Path(config.log_path).parent, config.rank)))
    log_to(config.log_path)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(arguments[0])
    channel = Channel(stream)
    inbox = listen(channel)
    channel.send({"type": "hello", "rank": config.rank, "pid": os.getpid()})
    message = inbox.get()
    try:
        rank = Rank(config, channel, _join)
    except Exception as error:  # noqa: BLE001 - the edge of the process: recorded in the log and answered
        traceback.print_exc()
        channel.send(failure_message(error))
    else:
        rank.serve(message)
    inbox.get()


def _join(device: str, backend: str) -> None:
    """Initialises the default group as torchrun's environment says."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, device_id=None if device == "cpu" else torch.device(device))


if __name__ == "__main__":
    main(sys.argv[1:])
