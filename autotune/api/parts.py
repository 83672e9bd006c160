"""What the handlers of one app work with, found through the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from fastapi import Request

if TYPE_CHECKING:
    from autotune.api.access import Gate, Principal
    from autotune.api.metrics import Liveness, Metrics
    from autotune.api.sharing import Cache, Combiner, Shared
    from autotune.fleet.service import FleetService
    from autotune.ports.fleet import FleetStore, Submission
    from autotune.specs import Tuning

Placed: TypeAlias = "tuple[Tuning, bool, int | None]"
"""A tuning, whether it was created now, and its place while it is queued."""


class Streams:
    """How many streams of events each principal has open. Only the event loop's thread changes it."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def open(self, principal: str | None = None) -> int:
        """The streams of a principal, or of all."""
        return self._open.total() if principal is None else self._open[principal]

    @contextmanager
    def one_more(self, principal: str) -> Iterator[None]:
        """Counts a stream while it is sent."""
        self._open[principal] += 1
        try:
            yield
        finally:
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Made once by the app. `submissions` stores requests that come together, and tells each its place in the queue;
    `beginnings` sends new tunings on.
    """

    store: FleetStore
    service: FleetService
    gate: Gate
    metrics: Metrics
    answers: Cache
    estimates: Cache
    shared: Shared
    submissions: Combiner[Submission, Placed]
    beginnings: Combiner[str, bool]
    streams: Streams
    liveness: Liveness


def parts_of(request: Request) -> Parts:
    """The parts of the app that this request reached."""
    return cast("Parts", request.app.state.parts)


def principal_of(request: Request) -> Principal:
    """Who asks. Every guarded route has one."""
    return cast("Principal", request.state.principal)
