"""StrictConsumer: Celery's consumer, which sees only messages of the kind that autotune.queue.sending sends.

Celery trusts headers and body of what is in its queue: a task's name that is a list, or a body that is null, ends its
worker, which gives the message back as it goes, and so on for ever. And a message could ask for time limits, delays
and further tasks. Here whatever is not plainly one of our tasks is dropped with a line in the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.state import reserved_requests

from autotune.queue.app import TaskName

log = logging.getLogger("autotune.consumer")
Receive = Callable[[Any], None]
_TEXTS = ("task", "id")
_NOT_USED = ("eta", "expires", "group", "group_index", "shadow", "compression")
_EMPTY = {"timelimit": (None, [None, None]), "retries": (None, 0), "stamps": (None, {})}


class StrictConsumer(Consumer):  # type: ignore[misc]
    """What create_app configures as every worker's consumer."""

    def create_task_handler(self, *arguments: Any, **named: Any) -> Receive:
        """Celery's handler, behind the check."""
        handle: Receive = super().create_task_handler(*arguments, **named)

        def receive(message: Any) -> None:
            fault = fault_of(message)
            if not fault:
                handle(message)
                return
            log.warning("dropped a message: %s", fault)
            message.reject_log_error(log, self.connection_errors)

        return receive


def fault_of(message: Any) -> str:
    """Why a kombu message is not one of ours; empty if it is."""
    headers = message.headers
    if not all(isinstance(headers.get(name), str) for name in _TEXTS):
        return "it names no task"
    if headers["task"] not in set(TaskName):
        return f"there is no task {headers['task'][:80]!r}"
    if any(headers.get(name) is not None for name in _NOT_USED):
        return "it asks for a delay, a group or the like"
    if any(headers.get(name) not in allowed for name, allowed in _EMPTY.items()):
        return "it asks for limits, retries or stamps"
    return _fault_of_body(message)


def _fault_of_body(message: Any) -> str:
    if message.content_type != "application/json":
        return "it is no JSON"
    try:
        body = json.loads(message.body)
    except (TypeError, ValueError, RecursionError):
        return "its body is no JSON"
    if not (isinstance(body, list) and [type(part) for part in body] == [list, dict, dict]):
        return "its body is no call"
    return "it asks for further tasks" if any(part is not None for part in body[2].values()) else ""


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
        is_stuck = not reserved_requests and not consumer.task_consumer.channel.qos.can_consume()
        if is_stuck and self._was_stuck:
            raise ConnectionError("a message that could not be acknowledged is in the way")
        self._was_stuck = is_stuck
