"""The edge between Celery and our code: each task checks its message, calls one action, and never raises.

A message that is not exactly what the task takes is dropped with a line in the log. What an action raises is
recorded there too: the database still says what is due, and a sweep sends it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, InputError
from workers.app import VISIBILITY_TIMEOUT_S
from workers.payloads import TaskName, read_payload

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("autotune.tasks")

Action = Callable[..., None]

# Celery kills the process of a task that takes longer: the last resort against one that hangs.
_LIMIT_S = 600.0
_RUN_LIMIT_S = 0.9 * VISIBILITY_TIMEOUT_S


def install_tasks(app: Celery, actions: Mapping[TaskName, Action]) -> None:
    """Makes the application run these tasks, and no others."""
    for task, act in actions.items():
        limit_s = _RUN_LIMIT_S if task is TaskName.RUN else _LIMIT_S
        app.task(_guarded(task, act), name=str(task), shared=False, time_limit=limit_s)


def _guarded(task: TaskName, act: Action) -> Callable[..., None]:
    def run(*arguments: Any, **named: Any) -> None:
        try:
            payload = read_payload(task, arguments, named)
        except InputError as error:
            log.warning("dropped: %s", error)
            return
        try:
            act(*payload)
        except AutotuneError as error:
            log.error("%s%s: %s", task, payload, error)
        except Exception:
            log.exception("%s%s failed", task, payload)

    return run
