"""The Celery application: settings that keep a fleet alive when brokers, nodes and processes are not.

Nothing is read at import: `create_app` is given the settings. Tasks are installed on it by the worker that runs them
(workers.handlers); whoever only sends (autotune.queue.sending) needs none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES
from pydantic import Field, TypeAdapter, ValidationError

from autotune.errors import InputError, Presence, masked
from autotune.settings import BROKER_VARIABLE, Settings

BROKER = Presence("the broker", logging.getLogger("autotune.queue"))
TUNER_QUEUE = "tuner"
SWEEP_QUEUE = "sweep"  # of the tuners too, but never behind the tunings that wait to be advanced
LONGEST_DEADLINE_S = 3600

# A message that is not acknowledged for this long is delivered again (kombu's restore_visible), so it must be longer
# than any task: the longest probe, what starts and ends it, and what it waits for a database that is away.
VISIBILITY_TIMEOUT_S = 2 * LONGEST_DEADLINE_S
SEND_TIMEOUT_S = 3.0
_CHECK_CONNECTION_S = 10  # kombu drops a silent BRPOP connection after this and its own timeout
_START_S = 60.0  # a worker process may take this long to say that it is up, on a machine that is busy measuring


_DATABASE = re.compile("(/[0-9]*)?")
_PLAIN = re.compile(r"([\w+.-]+://[^@\s'\"]*@)?[^@\s'\"]*")
_ESCAPES = "in a password write @ as %40, / as %2F, ? as %3F and # as %23"


def node_queue(node: str) -> str:
    """The queue that only this node consumes."""
    return f"node.{node}"


def create_app(settings: Settings) -> Celery:
    """A Celery application on the settings' broker, without tasks.

    Raises:
        InputError: the broker's URL is not one of Redis.
    """
    _require_redis(settings.broker_url)
    TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "autotune.queue.consumer:StrictTransport"))
    app = Celery("autotune", broker=_verified(settings.broker_url), set_as_current=False, changes=None)
    app.conf.update(_configuration())
    return app


def _verified(url: str) -> str:
    """The URL as one whose server has to prove its name, unless it says otherwise: kombu would trust anybody."""
    if not url.startswith("rediss://") or "ssl_cert_reqs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"


def _configuration() -> dict[str, Any]:
    return {
        # Messages carry ids as JSON; anything else is refused before it is decoded. Nobody asks for results.
        "accept_content": ["json"],
        "task_serializer": "json",
        "event_serializer": "json",
        "task_ignore_result": True,
        # A task is acknowledged when it has ended, and given back when its process died: each is safe to run twice.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_consumer": "autotune.queue.consumer:StrictConsumer",
        # What measures goes on measuring while Redis is away; its message may come again and will be dropped.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_retry": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": _transport_options(),
        "task_default_queue": TUNER_QUEUE,
        "worker_proc_alive_timeout": _START_S,
        # Remote control would let anybody who reaches Redis stop workers, and costs a connection each.
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


def _transport_options() -> dict[str, Any]:
    return {
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        "socket_timeout": SEND_TIMEOUT_S,
        "socket_connect_timeout": SEND_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": _CHECK_CONNECTION_S,
        # Of whoever sends: kombu would otherwise try for ever to connect (Connection.default_channel).
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0.2,
        "interval_max": 0.2,
    }


def _require_redis(url: str) -> None:
    """Raises InputError for what is no URL of Redis, without what may be a password in it."""
    try:
        parts = urlsplit(url)
        of_server = parts.scheme in {"redis", "rediss"} and parts.hostname and _DATABASE.fullmatch(parts.path)
        known = (bool(of_server) and parts.port != 0) or parts.scheme == "redis+socket"
    except ValueError:
        known = False
    if not known or parts.fragment or "@" in parts.path + parts.query:
        value = masked(url) if _PLAIN.fullmatch(url) else "what was given"
        raise InputError(BROKER_VARIABLE, value, f"give redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER]; {_ESCAPES}")


MAX_TOKEN = 2**63 - 1
Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
GpuSeconds = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=1, le=MAX_TOKEN)]


class TaskName(StrEnum):
    """The tasks of the fleet."""

    ADVANCE = "autotune.advance"
    RUN = "autotune.run"
    CANARY = "autotune.canary"
    SWEEP = "autotune.sweep"
    REGRESS = "autotune.regress"


_PAYLOADS: Mapping[TaskName, TypeAdapter[Any]] = {
    TaskName.ADVANCE: TypeAdapter(
        Annotated[tuple[Id, ...], Field(max_length=1)]
    ),  # a tuning, a check's job, or nothing: begin what waits
    TaskName.RUN: TypeAdapter(tuple[Id, Token]),  # job, the grant's token
    TaskName.CANARY: TypeAdapter(tuple[Id]),  # session
    TaskName.SWEEP: TypeAdapter(tuple[()]),
    TaskName.REGRESS: TypeAdapter(tuple[GpuSeconds | None]),  # budget
}


def read_payload(task: TaskName, arguments: Sequence[object], named: Mapping[str, object]) -> tuple[Any, ...]:
    """The task's arguments, if they are exactly what it takes. Raises InputError for anything else."""
    if named:
        raise InputError(str(task), sorted(named), "it takes no named arguments")
    try:
        found: tuple[Any, ...] = _PAYLOADS[task].validate_python(tuple(arguments), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(str(task), first.get("input"), first["msg"]) from None
    return found
