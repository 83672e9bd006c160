"""API keys: made, listed and revoked by an admin."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request

from autotune.api.answers import Json, KeyCreated, KeyPage
from autotune.api.examples import KEYS
from autotune.api.openapi import answer, problems
from autotune.api.parts import parts_of
from autotune.api.requests import DEFAULT_LIMIT, After, KeyBody, Limit, PathId, after_name, page
from autotune.api.roles import GuardedRoute
from autotune.fleet.keys import create_key
from autotune.specs import ApiKey

router = APIRouter(route_class=GuardedRoute, tags=["keys"])


@router.get("/keys", responses=answer(200, KeyPage))
def list_keys(request: Request, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Json:
    """List all keys, by id. Their secrets are not known here."""
    found = after_name(parts_of(request).store.keys(), lambda key: key.id, after, limit)
    return page(request, "keys", found, limit, cursor=lambda key: key.id, data=ApiKey.to_data)


@router.post("/keys", status_code=201, responses=answer(201, KeyCreated) | problems(409))
def make_key(request: Request, body: Annotated[KeyBody, Body(openapi_examples=KEYS)]) -> Json:
    """Make a key. Its secret is in this answer and nowhere else: only a hash of it is stored."""
    parts = parts_of(request)
    made = create_key(parts.store, body.name, body.role.value, body.expires_days)
    parts.gate.forget()
    return Json({"key": made.key.to_data(), "secret": made.secret}, 201)


@router.delete("/keys/{key_id}", responses=answer(200, ApiKey) | problems(404))
def revoke_key(request: Request, key_id: PathId) -> Json:
    """Revoke a key for good."""
    parts = parts_of(request)
    revoked = parts.store.revoke_key(key_id)
    parts.gate.forget()
    return Json(revoked.to_data())
