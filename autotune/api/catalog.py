"""Models and clusters: presets and stored ones, by name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.exceptions import HTTPException

from autotune.api.access import GuardedRoute
from autotune.api.answers import ClusterPage, Json, ModelPage
from autotune.api.examples import CLUSTERS, MODELS
from autotune.api.openapi import answer, problems
from autotune.api.parts import parts_of, principal_of
from autotune.api.requests import (
    DEFAULT_LIMIT,
    After,
    ClusterBody,
    Limit,
    ModelBody,
    PathName,
    after_name,
    find_cluster,
    find_model,
    page,
)
from autotune.catalog import model_entries, preset
from autotune.catalog.gpus import is_shorthand
from autotune.errors import InputError, StoreConflictError
from autotune.fleet.service import require_no_pool
from autotune.specs import ClusterSpec, ModelSpec

router = APIRouter(route_class=GuardedRoute, tags=["models and clusters"])


@router.get("/models", responses=answer(200, ModelPage))
def list_models(request: Request, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Json:
    """List the presets and the stored models, by name."""
    found = after_name(model_entries(parts_of(request).store.models()), _name, after, limit)
    return page(request, "models", found, limit, cursor=_name, data=dict)


@router.post("/models", status_code=201, responses=answer(201, ModelSpec) | problems(409, 422))
def store_model(request: Request, body: Annotated[ModelBody, Body(openapi_examples=MODELS)]) -> Json:
    """Store a model by its name, which is yours then: others cannot replace it, unless they are admins.

    One of the same name is replaced for new requests only.
    """
    if preset(body.name) is not None:
        raise InputError("name", body.name, "a preset has this name and would be found first: give another")
    parts, principal = parts_of(request), principal_of(request)
    parts.store.put_model(body, owner=principal.name, only_own=not principal.is_admin)
    parts.shared.forget()
    return Json(body.to_data(), 201)


@router.get("/models/{name:path}", responses=answer(200, ModelSpec) | problems(404))
def show_model(request: Request, name: PathName) -> Json:
    """Show one preset or stored model."""
    return Json(find_model(parts_of(request).store, name).to_data())


@router.get("/clusters", responses=answer(200, ClusterPage))
def list_clusters(request: Request, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Json:
    """List the stored clusters, by name."""
    found = after_name(parts_of(request).store.clusters(), lambda each: each.name, after, limit)
    return page(request, "clusters", found, limit, cursor=lambda each: each.name, data=ClusterSpec.to_data)


@router.post("/clusters", status_code=201, responses=answer(201, ClusterSpec) | problems(409, 422))
def store_cluster(request: Request, body: Annotated[ClusterBody, Body(openapi_examples=CLUSTERS)]) -> Json:
    """Store a cluster by its name, which is yours then: others cannot replace it, unless they are admins.

    One of the same name is replaced for new requests only. A pool that nodes have registered for is the admins', and
    its hardware stays as it is.
    """
    if is_shorthand(body.name):
        raise InputError("name", body.name, "a name without a colon: those are shorthands of the catalog")
    parts, principal = parts_of(request), principal_of(request)
    if not principal.is_admin and parts.store.nodes(body.name):
        raise StoreConflictError(f"cluster {body.name!r} is a pool with nodes, which only an admin changes")
    require_no_pool(parts.store, body)
    parts.store.put_cluster(body, owner=principal.name, only_own=not principal.is_admin)
    parts.shared.forget()
    return Json(body.to_data(), 201)


@router.get("/clusters/{name:path}", responses=answer(200, ClusterSpec) | problems(404))
def show_cluster(request: Request, name: PathName) -> Json:
    """Show one stored cluster, or what a shorthand such as a100-80gb-sxm:128x8 stands for."""
    try:
        return Json(find_cluster(parts_of(request).store, name).to_data())
    except InputError as error:  # no cluster is stored by that name, and as a shorthand it stands for none
        raise HTTPException(404, str(error)) from None


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"])
