"""The processes of a worker: a main process that consumes and watches itself, and children that run the tasks.

The pool is Celery's prefork. A node has one child, which holds the node's ranks; both are told by the kernel to die
with their parent (prctl PR_SET_PDEATHSIG: Celery sets it for the child, probes.launch.parent_death for the ranks), so a
worker that is killed leaves nothing. A task that blocks never keeps the main process from its broker.
"""

from __future__ import annotations

import logging
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from celery import Celery, signals
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning

from autotune.queue.app import BROKER, TaskName
from autotune.queue.consumer import PrefetchCheck
from autotune.shown import LogFormatter
from workers.handlers import Action, install_tasks
from workers.watchdog import Heartbeat, Watchdog, execute_again

log = logging.getLogger("autotune.worker")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_AGAIN_S = 1.0
# Celery logs each task that it receives and ends; our own lines say what the tasks did.
_QUIET = ("celery.worker.strategy", "celery.app.trace", "celery.worker.worker", "alembic.runtime.plugins")
_OF_THE_BROKER = ("celery.worker.consumer.consumer", "celery.worker.consumer.connection", "celery.worker.request")


class BrokerNews(logging.Filter):
    """Celery's lines about its broker, of which it writes one every few seconds, become ours: away, and back."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written as it is."""
        text = record.getMessage()
        if "Cannot connect to" in text or "Connection to broker lost" in text:
            BROKER.away(" ".join(text.split()))
            return False
        if text.startswith("Connected to"):
            was_there = BROKER.is_there
            BROKER.back()
            return bool(was_there)
        record.exc_info = None if text.startswith("Couldn't ack") else record.exc_info
        return not text.startswith(("Skipping prefetch", "Temporarily reducing"))


_NEWS = BrokerNews()


class LazyHandlers:
    """Opened by the first task in a child process: a connection must not be shared across a fork.

    Args:
        open_handlers: opens them.
        heartbeat: beaten by each task that was consumed.
    """

    def __init__(self, open_handlers: Callable[[], Any], heartbeat: Heartbeat) -> None:
        self._open, self._heartbeat = open_handlers, heartbeat

    @cached_property
    def handlers(self) -> Any:
        """The opened handlers."""
        return self._open()

    def action(self, name: str) -> Action:
        """A method of the handlers, which are opened when it is called."""

        def act(*payload: object) -> None:
            self._heartbeat.renew()
            getattr(self.handlers, name)(*payload)

        return act

    def close(self) -> None:
        """Closes them if they were opened."""
        if "handlers" in self.__dict__:
            self.handlers.close()


def run_worker(
    app: Celery,
    *,
    name: str,
    queues: Sequence[str],
    concurrency: int,
    actions: Mapping[TaskName, Action],
    close: Callable[[], None],
    heartbeat: Heartbeat,
    send_canary: Callable[[], bool],
    keeps_name: Callable[[], bool],
    patience_s: float,
    quiet_after_s: float,
) -> int:
    """Consumes until SIGTERM (ends what runs within seconds), SIGINT or eviction; returns the exit status.

    While the broker is away it waits and says so.
    """
    install_tasks(app, actions)
    app.steps["consumer"].add(PrefetchCheck)
    log_to_stderr()
    _silence_announcements()

    def keep_logging(**_: object) -> None:
        """Having a receiver, Celery leaves logging as it is."""

    def stop(**_: object) -> None:
        heartbeat.stop()

    def leave(**_: object) -> None:
        close()

    def watch(**_: object) -> None:
        """Not before it consumes: on a busy machine a worker may take longer to come up than its patience lasts."""
        Watchdog(heartbeat, send_canary, keeps_name, patience_s=patience_s, quiet_after_s=quiet_after_s).start()

    signals.worker_ready.connect(watch, weak=False)
    signals.setup_logging.connect(keep_logging, weak=False)
    signals.celeryd_after_setup.connect(_silence_announcements, weak=False)
    signals.worker_shutting_down.connect(stop, weak=False)
    signals.worker_process_shutdown.connect(leave, weak=False)
    worker = app.Worker(
        hostname=f"{name}@{socket.gethostname()}",
        pool="prefork",
        concurrency=concurrency,
        queues=list(queues),
        optimization="fair",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    worker.start()
    if not heartbeat.stopping:
        # Celery gives up on what it cannot read, such as a message that is no JSON at all; that message is gone now.
        log.error("the consumer ended by itself: this worker starts itself again")
        time.sleep(_AGAIN_S)
        execute_again()
    return int(worker.exitcode or 0)


def log_to_stderr(level: int = logging.INFO) -> None:
    """One line an event, from our loggers and Celery's."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _OF_THE_BROKER:
        logging.getLogger(name).addFilter(_NEWS)


def _silence_announcements(**_: object) -> None:
    """Hides Celery's warnings about its version 6, and that root should accept no pickles, which are refused here.

    Needed twice: Celery turns the former on again when it sets its logging up.
    """
    for category in (CPendingDeprecationWarning, SecurityWarning):
        warnings.filterwarnings("ignore", category=category)
