"""What operates the API: health, metrics, the OpenAPI document; and keys, which an admin makes, lists and revokes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from autotune.api.access import GuardedRoute
from autotune.api.answers import Alive, Health, Json, KeyCreated, KeyPage
from autotune.api.examples import KEYS
from autotune.api.openapi import answer, problems
from autotune.api.parts import parts_of
from autotune.api.requests import DEFAULT_LIMIT, After, KeyBody, Limit, PathId, after_name, page
from autotune.fleet.keys import create_key
from autotune.specs import ApiKey

router = APIRouter(route_class=GuardedRoute, tags=["operation"])
keys = APIRouter(route_class=GuardedRoute, tags=["keys"])


@router.get("/healthz", responses=answer(200, Health))
async def health(request: Request) -> Json:
    """Whether the database and the broker answer, asked a second ago at most.

    Without the database nothing works, and this is an error 503. Without the broker the API still answers and stores
    requests; they are sent to the workers once it is back.
    """
    broker = "ok" if await parts_of(request).liveness.broker_is_there() else "unreachable"
    return Json({"status": "ok" if broker == "ok" else "degraded", "database": "ok", "broker": broker})


@router.get("/livez", responses=answer(200, Alive))
async def alive(_request: Request) -> Json:
    """Whether the API answers at all; nothing else is asked. For whoever starts it again when it does not."""
    return Json({"status": "ok"})


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


@keys.get("/keys", responses=answer(200, KeyPage))
def list_keys(request: Request, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Json:
    """List all keys, by id. Their secrets are not known here."""
    found = after_name(parts_of(request).store.keys(), lambda key: key.id, after, limit)
    return page(request, "keys", found, limit, cursor=lambda key: key.id, data=ApiKey.to_data)


@keys.post("/keys", status_code=201, responses=answer(201, KeyCreated) | problems(409))
def make_key(request: Request, body: Annotated[KeyBody, Body(openapi_examples=KEYS)]) -> Json:
    """Make a key. Its secret is in this answer and nowhere else: only a hash of it is stored."""
    parts = parts_of(request)
    made = create_key(parts.store, body.name, body.role.value, body.expires_days)
    parts.gate.forget()
    return Json({"key": made.key.to_data(), "secret": made.secret}, 201)


@keys.delete("/keys/{key_id}", responses=answer(200, ApiKey) | problems(404))
def revoke_key(request: Request, key_id: PathId) -> Json:
    """Revoke a key for good."""
    parts = parts_of(request)
    revoked = parts.store.revoke_key(key_id)
    parts.gate.forget()
    return Json(revoked.to_data())
