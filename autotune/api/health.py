"""Health, metrics and the OpenAPI document."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from autotune.api.answers import Health, Json
from autotune.api.openapi import answer
from autotune.api.parts import parts_of
from autotune.api.roles import GuardedRoute
from autotune.errors import StoreError
from autotune.tuning.fleet_ports import FleetStore

router = APIRouter(route_class=GuardedRoute, tags=["operation"])


TRUST_S = 1.0
"""How old a finding may be: whoever asks more often asks neither the database nor the broker more often."""


class Pulse:
    """Whether the database and the broker answer, as it was a second ago at most.

    One request asks, in a thread; those that come meanwhile wait for what it finds, without a thread each.

    Args:
        store: the database's.
        broker_answers: asks the broker whether it is there.
    """

    def __init__(self, store: FleetStore, broker_answers: Callable[[], bool]) -> None:
        self._store, self._broker_answers, self._busy = store, broker_answers, anyio.Lock()
        self._until, self._found = 0.0, False
        self._error: StoreError | None = None

    async def broker_is_there(self) -> bool:
        """Whether the broker answers. Raises StoreError where the database does not."""
        async with self._busy:
            if time.monotonic() >= self._until:
                await run_in_threadpool(self._ask)
                self._until = time.monotonic() + TRUST_S
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._found

    def _ask(self) -> None:
        try:
            self._store.now()
        except StoreError as error:
            self._error = error
        else:
            self._error, self._found = None, self._broker_answers()


@router.get("/healthz", responses=answer(200, Health))
async def health(request: Request) -> Json:
    """Whether the database and the broker answer, asked a second ago at most.

    Without the database nothing works, and this is an error 503. Without the broker the API still answers and stores
    requests; they are sent to the workers once it is back.
    """
    broker = "ok" if await parts_of(request).pulse.broker_is_there() else "unreachable"
    return Json({"status": "ok" if broker == "ok" else "degraded", "database": "ok", "broker": broker})


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "autotune_leases 2.0\n"}},
        },
    },
)
def metrics(request: Request) -> Response:
    """Tunings, jobs and nodes by state, leases, GPU-seconds, and the latency of requests."""
    text, media_type = parts_of(request).metrics.text()
    return Response(text, media_type=media_type)


@router.get(
    "/openapi.json",
    responses={
        200: {
            "description": "This document (OpenAPI 3.1).",
            "content": {
                "application/json": {
                    "schema": {"type": "object", "required": ["openapi", "info", "paths"]},
                    "example": {"openapi": "3.1.0", "info": {"title": "autotune", "version": "1"}, "paths": {}},
                }
            },
        }
    },
)
def openapi(request: Request) -> Json:
    """Describe this API."""
    return Json(request.app.openapi())
