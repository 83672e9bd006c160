"""A fleet's processes: `autotune serve` answers, `worker` measures and decides, `beat` keeps time."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from datetime import datetime, time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from autotune.cli import options, output
from autotune.cli.options import option
from autotune.errors import InputError, masked
from autotune.settings import Settings, read_settings
from autotune.shown import require_plain

if TYPE_CHECKING:
    from autotune.queue.sending import CeleryQueue

PORT = 8765
LONGEST_PATIENCE_S = 86_400.0
_NODE = "Node"


def serve(
    host: Annotated[
        str, option("--host", "ADDRESS", "Listen here. Beyond loopback put a proxy with TLS before it.")
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", min=0, max=65535, help="Listen there; 0 takes a free one.")] = PORT,
    db: options.Database = None,
    broker: options.Broker = None,
    rate_limit: Annotated[str, option("--rate-limit", "COUNT/TIME", "Requests of one key at most.")] = "6000/minute",
    open_to_this_machine: Annotated[
        bool,
        option(
            "--open-to-this-machine",
            help="Take requests without a key, in the role submit, from whoever is on this machine. Not behind a "
            "proxy: what that passes on comes from this machine.",
        ),
    ] = False,
) -> None:
    """Serve the HTTP API until SIGTERM or Ctrl-C: tunings, events, best plans, nodes, metrics; GET /openapi.json.

    Each request shows a key, and the first one is made by `autotune keys create NAME --role admin`. Keys travel in the
    clear: beyond this machine put a proxy with TLS before it.
    """
    from autotune.api.application import create_app
    from autotune.api.server import require_key, run
    from autotune.wiring import open_fleet, open_queue, open_store
    from workers.process import log_to_stderr

    log_to_stderr(logging.WARNING)
    settings = _settings(db, broker)
    with closing(open_store(db)) as store, closing(open_queue(settings)) as queue:
        require_key(store, host, open_locally=open_to_this_machine)
        _warn_without_broker(queue, settings.broker_url)
        with closing(open_fleet(store, open_queue(settings))) as fleet:
            app = create_app(
                store, fleet, broker_answers=queue.answers, open_locally=open_to_this_machine, rate=rate_limit
            )
            run(app, host=host, port=port)


def _warn_without_broker(queue: CeleryQueue, url: str) -> None:
    if not queue.answers():
        output.error_console().print(
            f"Warning: the broker {masked(url)} does not answer. "
            "Requests are stored; workers get them once it is back.",
            soft_wrap=True,
        )


class WorkerRole(StrEnum):
    """What a worker does."""

    NODE = "node"
    TUNER = "tuner"


def worker(
    role: Annotated[
        WorkerRole, option("--role", help="node measures on this machine; tuner advances tunings.")
    ] = WorkerRole.NODE,
    name: Annotated[
        str | None, option("--name", "NAME", "Unique in the fleet. Default: this machine's host name.")
    ] = None,
    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "CLUSTER",
            "The pool that this node belongs to: a file, a stored name, or GPU:NODESxGPUS_PER_NODE. "
            "Default: this machine alone.",
            panel=_NODE,
        ),
    ] = None,
    address: Annotated[
        str | None,
        option(
            "--address",
            "ADDRESS",
            "Where other nodes reach this one. Default: the address by which it reaches the broker.",
            panel=_NODE,
        ),
    ] = None,
    interface: Annotated[
        str | None,
        option(
            "--interface",
            "NAME",
            "Network interface of gloo and NCCL. Default: the one that has the address.",
            panel=_NODE,
        ),
    ] = None,
    topology: Annotated[
        str,
        option(
            "--topology", "PLACE", "Place in the network, such as rack1/switch2: ranks are ordered by it.", panel=_NODE
        ),
    ] = "",
    slots: Annotated[
        int | None, option("--slots", "N", min=1, help="Devices to offer. Default: all that are found.", panel=_NODE)
    ] = None,
    concurrency: Annotated[int, option("--concurrency", "N", min=1, max=64, help="Processes of a tuner.")] = 2,
    patience: Annotated[
        float,
        option(
            "--patience",
            "SECONDS",
            help="Start again when nothing came through this worker's own queue for so long.",
        ),
    ] = 30.0,
    db: options.Database = None,
    broker: options.Broker = None,
) -> int:
    """Serve a fleet from this machine until SIGTERM.

    While the broker is away a worker waits and says so. A worker of the same name that starts later takes over.
    """
    import socket

    from autotune.cli.inputs import read_cluster
    from autotune.wiring import make_folder
    from workers.registration import NodeOptions, place
    from workers.roles import run_node, run_tuner

    if not 1 <= patience <= LONGEST_PATIENCE_S:
        raise InputError("--patience", patience, f"1 to {LONGEST_PATIENCE_S:.0f} seconds")
    settings = _settings(db, broker)
    make_folder(db)
    if role is WorkerRole.TUNER:
        return run_tuner(settings, name=name, concurrency=concurrency, patience_s=patience)
    name = name or socket.gethostname()
    if not all(character.isalnum() or character in "._-" for character in name):
        raise InputError("--name", name, "letters, digits, '.', '_' and '-' make a node's name")
    require_plain("--topology", topology)
    address, interface = place(address, interface, settings.broker_url)
    chosen = NodeOptions(
        name=name, cluster=read_cluster(cluster, db), address=address, interface=interface, topology=topology,
        slots=slots, lost_after_s=settings.times.lease_s,
    )  # fmt: skip
    return run_node(settings, chosen, patience_s=patience)


def beat(
    nightly: Annotated[
        str | None, option("--nightly", "HH:MM", "Check the best-known plans every day at this time (UTC).")
    ] = None,
    budget_gpu_s: Annotated[
        float | None, option("--nightly-gpu-s", "SECONDS", "GPU-seconds a night may cost. Default: no limit.")
    ] = None,
    db: options.Database = None,
    broker: options.Broker = None,
) -> None:
    """Ask for a sweep every few seconds: what was lost is sent again. One suffices, two do no harm.

    With --nightly also for checks whether the best-known plans still hold: see `autotune regress --help`.
    """
    from autotune.specs.base import MOST_GPU_S
    from autotune.wiring import open_queue
    from workers.beat import Nightly, run_beat
    from workers.process import log_to_stderr

    if budget_gpu_s is not None and (nightly is None or not 0 < budget_gpu_s <= MOST_GPU_S):
        raise InputError("--nightly-gpu-s", budget_gpu_s, f"above 0 and at most {MOST_GPU_S:g}, with --nightly")
    at = None if nightly is None else _time_of_day(nightly)
    log_to_stderr()
    night = None if at is None else Nightly(at=at, budget_gpu_s=budget_gpu_s)
    settings = _settings(db, broker)
    run_beat(open_queue(settings), night, sweep_every_s=settings.times.sweep_every_s)


def _time_of_day(text: str) -> time:
    try:
        return datetime.strptime(text, "%H:%M").time()
    except ValueError:
        raise InputError("--nightly", text, "a time of day as HH:MM, in UTC") from None


def _settings(db: str | None, broker: str | None) -> Settings:
    settings = read_settings()
    return replace(settings, database_url=db or settings.database_url, broker_url=broker or settings.broker_url)
