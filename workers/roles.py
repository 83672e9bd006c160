"""The two kinds of worker: a node, which measures, and a tuner, which decides."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autotune import wiring
from autotune.errors import AutotuneError, InputError
from autotune.queue.app import SWEEP_QUEUE, TUNER_QUEUE, TaskName, create_app, node_queue
from autotune.queue.sending import CeleryQueue
from workers.handlers import TunerHandlers
from workers.process import LazyHandlers, log_to_stderr, run_worker
from workers.registration import NodeOptions, register
from workers.watchdog import Heartbeat, end_children

if TYPE_CHECKING:
    from autotune.ports.fleet import FleetStore
    from autotune.settings import Settings
    from autotune.specs import Node

# On a machine that it shares with API, databases or ranks, those go first: a decision can wait.
_TUNER_NICE = 10
_AUTOGROUP = Path("/proc/self/autogroup")


def run_node(settings: Settings, options: NodeOptions, *, patience_s: float) -> int:
    """Registers this machine as a node and serves until SIGTERM; returns the exit status.

    Raises:
        InputError: the cluster is stored otherwise, or (at the end) another worker has taken the node's name.
        StoreError: there is no database.
        ProberError: there is nothing to measure with.
    """
    end_children()
    log_to_stderr()
    app, queue, heartbeat = create_app(settings), CeleryQueue(create_app(settings)), Heartbeat()
    node = _register(settings, options, queue)
    lazy = LazyHandlers(lambda: wiring.open_node(settings, node, options.interface, heartbeat), heartbeat)
    status = run_worker(
        app,
        name=node.name,
        queues=[node_queue(node.name)],
        concurrency=1,
        actions={
            TaskName.RUN: lazy.action("run"),
            TaskName.CANARY: lazy.action("canary"),
        },
        close=lazy.close,
        heartbeat=heartbeat,
        send_canary=lambda: queue.canary(node.name, node.session),
        keeps_name=lambda: _keeps_name(settings, node),
        patience_s=patience_s,
        quiet_after_s=settings.times.quiet_after_s,
    )
    if heartbeat.evicted:
        raise InputError("--name", node.name, "another worker has registered as this node: give each its own name")
    return status


def _register(settings: Settings, options: NodeOptions, queue: CeleryQueue) -> Node:
    with _opened_before_the_fork(settings) as store:
        inventory = wiring.read_inventory(settings, options.cluster, options.slots)
        queue.clear(options.name)
        return register(store, options, inventory, wiring.read_offers(settings))


def _keeps_name(settings: Settings, node: Node) -> bool:
    """Whether no other worker's session has the node, or the database does not tell."""
    try:
        with closing(wiring.open_store(settings.database_url)) as store:
            return store.node(node.name).session in {node.session, ""}
    except AutotuneError:
        return True


def run_tuner(settings: Settings, *, name: str | None, concurrency: int, patience_s: float) -> int:
    """Advances tunings and sweeps until SIGTERM; returns the exit status. Raises StoreError without a database."""
    end_children()
    log_to_stderr()
    app, queue, heartbeat = create_app(settings), CeleryQueue(create_app(settings)), Heartbeat()
    with _opened_before_the_fork(settings):
        pass
    _yield_to_others()
    own = f"{TUNER_QUEUE}.{name or f'{socket.gethostname()}-{os.getpid()}'}"
    lazy = LazyHandlers(lambda: _tuner_handlers(settings), heartbeat)
    return run_worker(
        app,
        name=own,
        queues=[TUNER_QUEUE, SWEEP_QUEUE, node_queue(own)],
        concurrency=concurrency,
        actions={
            TaskName.ADVANCE: lazy.action("advance"),
            TaskName.SWEEP: lazy.action("sweep"),
            TaskName.REGRESS: lazy.action("regress"),
            TaskName.CANARY: lazy.action("canary"),
        },
        close=lazy.close,
        heartbeat=heartbeat,
        send_canary=lambda: queue.canary(own, own),
        keeps_name=lambda: True,
        patience_s=patience_s,
        quiet_after_s=settings.times.quiet_after_s,
    )


def _yield_to_others() -> None:
    """Lowers this process's priority, and that of the children it will have; not further if it was started so.

    Linux shares the processor out among sessions first (sched(7), autogroups): a session of our own is lowered, too.
    """
    nice = max(os.getpriority(os.PRIO_PROCESS, 0), _TUNER_NICE)
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without them, or asked by somebody else in the same tenth of a second
            _AUTOGROUP.write_text(str(nice))


def _tuner_handlers(settings: Settings) -> TunerHandlers:
    store, queue = wiring.open_store(settings.database_url), wiring.open_queue(settings)
    fleet = wiring.open_fleet(store, queue, settings.times, settings.max_live)
    regression = wiring.open_regression(settings, store, queue, fleet)
    return TunerHandlers(fleet, regression, sweep_every_s=settings.times.sweep_every_s)


@contextmanager
def _opened_before_the_fork(settings: Settings) -> Iterator[FleetStore]:
    """The store, for the main process only.

    If there is no database that is one clear error now, rather than one a task. What the tasks need is imported
    here, once, and the children share it.
    """
    with (
        closing(wiring.open_store(settings.database_url)) as store,
        closing(wiring.open_fleet(store, wiring.open_queue(settings))),
    ):
        yield store
