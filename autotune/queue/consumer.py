"""What a worker takes from the broker: only messages of the kind that autotune.queue.sending sends.

Kombu and Celery trust what is in their queues: an envelope that is no JSON, a header that is a list or a body that is
null ends a worker, which gives the message back as it goes, and so on for ever; a compressed body is unpacked whatever
its size; and a message could ask for time limits, delays and further tasks. Here whatever is not plainly one of our
tasks is dropped, before kombu has seen more of it than its bytes. So is a task of another kind of worker.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.state import reserved_requests
from kombu.transport import redis

from autotune.errors import InputError
from autotune.queue.app import TaskName, read_payload

log = logging.getLogger("autotune.consumer")

MAX_MESSAGE_BYTES = 2**17
"""Ours name one tuning or job, and take a hundredth of that."""

_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NOT_USED = ("eta", "expires", "group", "group_index", "shadow", "compression")
_EMPTY = {"timelimit": (None, [None, None]), "retries": (None, 0), "stamps": (None, {})}


class Dropped:
    """Counts what is dropped, and tells of it once in ten seconds: whoever forges messages cannot fill a log."""

    EVERY_S, MAX_REASONS = 10.0, 20

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._tell_at_s = 0.0

    def note(self, reason: str) -> None:
        """One more message was dropped."""
        known = reason in self._untold or len(self._untold) < self.MAX_REASONS
        self._untold[reason if known else "other reasons"] += 1
        self.tell()

    def tell(self) -> None:
        """Tells of what was dropped since the last time, unless that was a moment ago; called every few seconds."""
        if not self._untold or time.monotonic() < self._tell_at_s:
            return
        self._tell_at_s = time.monotonic() + self.EVERY_S
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self._untold.most_common())
        log.warning("dropped %d messages: %s", self._untold.total(), reasons)
        self._untold.clear()


DROPPED = Dropped()


class StrictQoS(redis.QoS):
    """What was delivered and not acknowledged."""

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Gives a message back; drops one that cannot be read."""
        try:
            super().restore_by_tag(tag, client, leftmost)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RecursionError) as error:
            DROPPED.note(f"it was not acknowledged and cannot be read ({type(error).__name__})")
            self._remove_from_indices(tag).execute()  # type: ignore[no-untyped-call]


class StrictChannel(redis.Channel):
    """A channel whose consumers get messages of ours alone."""

    QoS = StrictQoS

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous)  # type: ignore[no-untyped-call]
        client.set_response_callback("BRPOP", _accepted)
        return client


class StrictTransport(redis.Transport):
    """What create_app has kombu use for Redis."""

    Channel = StrictChannel


def _accepted(popped: Sequence[bytes] | None, **_: Any) -> Sequence[bytes] | None:
    """What a queue gave, if it is one of our messages; None, as of an empty queue, if not."""
    fault = fault_of(popped[1]) if popped else ""
    if fault:
        DROPPED.note(fault)
    return None if fault else popped


def fault_of(raw: bytes) -> str:
    """Why what lies in a queue is not one of our messages; empty if it is."""
    if len(raw) > MAX_MESSAGE_BYTES:
        return f"it has {len(raw)} bytes, and {MAX_MESSAGE_BYTES} are allowed"
    envelope = _read(raw)
    if not isinstance(envelope, dict):
        return "it is no JSON object"
    headers, properties = envelope.get("headers"), envelope.get("properties")
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        return "it has no headers or properties"
    return _fault_of_headers(headers) or _fault_of_properties(properties) or _fault_of_body(envelope)


def _read(raw: bytes) -> Any:
    """A JSON value; None for what is not plain JSON (kombu would make other objects of some)."""
    try:
        return json.loads(raw, object_hook=_plain)
    except (ValueError, RecursionError):
        return None


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    if "__type__" in found:
        raise ValueError("not a plain object")
    return found


def _fault_of_headers(headers: dict[str, Any]) -> str:
    task = headers.get("task")
    if not isinstance(task, str) or not _is_id(headers.get("id")):
        return "it names no task"
    if task not in set(TaskName):
        return f"there is no task {task[:40]!r}"
    if any(headers.get(name) is not None for name in _NOT_USED):
        return "it is compressed, or asks for a delay, a group or the like"
    if any(headers.get(name) not in allowed for name, allowed in _EMPTY.items()):
        return "it asks for limits, retries or stamps"
    return ""


def _fault_of_properties(properties: dict[str, Any]) -> str:
    route = properties.get("delivery_info")
    if not isinstance(route, dict) or not all(isinstance(route.get(name), str) for name in ("exchange", "routing_key")):
        return "it has no route"
    if not _is_id(properties.get("delivery_tag")):
        return "it has no tag"
    if not all(isinstance(properties.get(name), str | None) for name in ("correlation_id", "reply_to")):
        return "it asks for an answer in an unknown way"
    return "" if isinstance(properties.get("priority"), int | None) else "its priority is no number"


def _fault_of_body(envelope: dict[str, Any]) -> str:
    how = (envelope.get("content-type"), envelope.get("content-encoding"))
    if how != ("application/json", "utf-8") or envelope["properties"].get("body_encoding") != "base64":
        return "its body is no JSON"
    try:
        body = _read(base64.b64decode(envelope.get("body", ""), validate=True))
    except (ValueError, TypeError):
        return "its body is no base64"
    if not (isinstance(body, list) and [type(part) for part in body] == [list, dict, dict]):
        return "its body is no call"
    if any(part is not None for part in body[2].values()):
        return "it asks for further tasks"
    task = TaskName(envelope["headers"]["task"])
    try:
        read_payload(task, body[0], body[1])
    except InputError:
        return f"{task} takes other arguments"
    return ""


def _is_id(found: Any) -> bool:
    return isinstance(found, str) and _ID.fullmatch(found) is not None


class StrictConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer, which drops a task that this kind of worker does not have; without a traceback each."""

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Drops it."""
        DROPPED.note(f"{message.headers['task']} is for another kind of worker")
        message.reject_log_error(log, self.connection_errors)


_EVERY_S = 2.0


class PrefetchCheck(bootsteps.StartStopStep):  # type: ignore[misc]
    """Gives a consumer that waits for a message that was lost a new connection; a step of Celery's consumer.

    With a prefetch of 1 a consumer asks for the next message when the last one is acknowledged. Where Redis goes away
    in just that moment, kombu logs "Couldn't ack" and keeps the message counted for ever
    (kombu.message.ack_log_error): the consumer asks for nothing any more, and does not even notice that its connection
    is gone. workers.watchdog would find that by its canaries; this finds it sooner, and without ending what runs.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None
        self._was_stuck = False

    def start(self, consumer: Any) -> None:
        """Begins with each connection."""
        self._was_stuck = False
        self._timer = consumer.timer.call_repeatedly(_EVERY_S, self._look, (consumer,))

    def stop(self, consumer: Any) -> None:
        """Ends with it."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, consumer: Any) -> None:
        """Raises ConnectionError, which makes the consumer connect again, at the second look that finds it stuck."""
        DROPPED.tell()
        is_stuck = not reserved_requests and not consumer.task_consumer.channel.qos.can_consume()
        if is_stuck and self._was_stuck:
            raise ConnectionError("a message that could not be acknowledged is in the way")
        self._was_stuck = is_stuck
