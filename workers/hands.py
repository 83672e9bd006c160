"""What a worker's tasks work with, as they see it; autotune.wiring opens it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from autotune.specs import Job, MemberOrder, MemberReport, ProbeRequest

# Sweeps closer together than this do nothing more. Many wait when all tuners were away for a while.
_SWEEP_APART_S = 2.0


class Fleet(Protocol):
    """The service of a fleet: what the tasks call."""

    def begin(self, *tuning_ids: str) -> object:
        """Tells tuners of tunings."""

    def advance(self, tuning_id: str) -> object:
        """Takes the next steps of a tuning."""

    def schedule(self, pool: str) -> object:
        """Grants what waits in a pool."""

    def finish(self, job: Job) -> object:
        """Ends a job that all its members have reported."""

    def sweep(self) -> object:
        """Sends again what is due, and ends what was left."""


class Ranks(Protocol):
    """The ranks of this node."""

    def run(
        self,
        share: Any,
        request: ProbeRequest,
        *,
        deadline_s: float,
        publish: Callable[[str], object],
        order: Callable[..., MemberOrder],
    ) -> MemberReport:
        """Runs this node's share of a job."""

    def close(self) -> None:
        """Ends the ranks."""


class TunerHands:
    """What the tasks of a tuner do. Lives in each child process that runs them.

    Args:
        fleet: the service.
        check_on: moves the checks of best-known plans on, and sends alerts; called with every sweep.
        go_on: moves on the check that a job measured for.
        begin_checks: begins a night's checks within a budget of GPU-seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        check_on: Callable[[], object],
        go_on: Callable[[str], object],
        begin_checks: Callable[[float | None], object],
    ) -> None:
        self._fleet, self._check_on, self._go_on, self._begin_checks = fleet, check_on, go_on, begin_checks
        self._swept_at_s: float | None = None

    def canary(self, _: str) -> None:
        """Nothing but the pulse of having been consumed."""

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
        if self._swept_at_s is None or now - self._swept_at_s > _SWEEP_APART_S:
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
