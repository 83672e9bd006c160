"""What the handlers of one app work with, found through the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import Request

if TYPE_CHECKING:
    from autotune.api.access import Gate, Principal
    from autotune.api.cache import Cache, Recent
    from autotune.api.metrics import Metrics
    from autotune.tuning.fleet.service import FleetService
    from autotune.tuning.fleet_ports import FleetStore


@dataclass(slots=True)
class Streams:
    """How many streams of events are open. Only the event loop's thread changes it."""

    open: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Made once by the app. `broker_answers` asks the broker whether it is there."""

    store: FleetStore
    service: FleetService
    gate: Gate
    metrics: Metrics
    answers: Cache
    recent: Recent
    streams: Streams
    broker_answers: Callable[[], bool]


def parts_of(request: Request) -> Parts:
    """The parts of the app that this request reached."""
    return cast("Parts", request.app.state.parts)


def principal_of(request: Request) -> Principal:
    """Who asks. Every guarded route has one."""
    return cast("Principal", request.state.principal)
