"""Health, metrics and the OpenAPI document."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from autotune.api.answers import Health, Json
from autotune.api.openapi import answer
from autotune.api.parts import parts_of
from autotune.api.roles import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["operation"])


@router.get("/healthz", responses=answer(200, Health))
async def health(request: Request) -> Json:
    """Whether the database and the broker answer, asked a second ago at most.

    Without the database nothing works, and this is an error 503. Without the broker the API still answers and stores
    requests; they are sent to the workers once it is back.
    """
    broker = "ok" if await parts_of(request).liveness.broker_is_there() else "unreachable"
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
