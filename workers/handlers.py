"""What a worker does with its tasks: the edge between Celery and our code, and a tuner's handlers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, InputError
from autotune.queue.app import VISIBILITY_TIMEOUT_S, TaskName, read_payload

if TYPE_CHECKING:
    from celery import Celery

    from autotune.fleet.service import FleetService

log = logging.getLogger("autotune.tasks")
Action = Callable[..., None]

# Celery kills the process of a task that takes longer: the last resort against one that hangs.
_LIMIT_S = 600.0
_RUN_LIMIT_S = 0.9 * VISIBILITY_TIMEOUT_S


def install_tasks(app: Celery, actions: Mapping[TaskName, Action]) -> None:
    """Makes the application run these tasks alone. Each checks its message, calls one action, and never raises.

    A message that is not exactly what the task takes is dropped with a line in the log. What an action raises is
    recorded there too: the database still says what is due, and a sweep sends it again.
    """
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


# Of the time between two sweeps. Closer together they do nothing more: many wait when all tuners were away for a while.
_SWEEPS_APART = 0.4


class TunerHandlers:
    """What the tasks of a tuner do. Lives in each child process that runs them.

    Args:
        fleet: the service.
        sweep_every_s: how often sweeps are asked for.
        check_on: moves the checks of best-known plans on, and sends alerts; called with every sweep.
        go_on: moves on the check that a job measured for.
        begin_checks: begins a night's checks within a budget of GPU-seconds.
    """

    def __init__(
        self,
        fleet: FleetService,
        *,
        sweep_every_s: float,
        check_on: Callable[[], object],
        go_on: Callable[[str], object],
        begin_checks: Callable[[float | None], object],
    ) -> None:
        self._fleet, self._check_on, self._go_on, self._begin_checks = fleet, check_on, go_on, begin_checks
        self._sweep_apart_s = _SWEEPS_APART * sweep_every_s
        self._swept_at_s: float | None = None

    def canary(self, _: str) -> None:
        """Nothing but the heartbeat of having been consumed."""

    def advance(self, *tuning_ids: str) -> None:
        """Takes the next steps of a tuning. Several go a message each, so that all tuners share them."""
        if len(tuning_ids) == 1:
            self._fleet.advance(tuning_ids[0])
            return
        for each in tuning_ids:
            self._fleet.begin(each)

    def sweep(self) -> None:
        """Sends again what is due, unless this process did a moment ago."""
        now = time.monotonic()
        if self._swept_at_s is None or now - self._swept_at_s > self._sweep_apart_s:
            self._swept_at_s = now
            self._fleet.sweep()
            self._check_on()

    def regress(self, budget_gpu_s: float | None) -> None:
        """Begins this night's checks; those that are under way are not begun twice."""
        self._begin_checks(budget_gpu_s)

    def check(self, job_id: str) -> None:
        """Takes the next step of the check that a job measured for."""
        self._go_on(job_id)

    def close(self) -> None:
        """Nothing is left to end."""
