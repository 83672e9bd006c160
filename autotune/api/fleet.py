"""Nodes, jobs and measurements: what the fleet is, does and found."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Query, Request

from autotune.api.access import GuardedRoute
from autotune.api.answers import JobPage, Json, NodeAnswer, NodeChanged, NodeForgotten, NodePage
from autotune.api.examples import QUARANTINES
from autotune.api.known_answers import MeasurementPage
from autotune.api.openapi import answer, problems
from autotune.api.parts import parts_of, principal_of
from autotune.api.requests import (
    DEFAULT_LIMIT,
    After,
    AfterNumber,
    Limit,
    PathName,
    QuarantineBody,
    Text,
    after_name,
    page,
)
from autotune.specs import Job, JobState, Node

if TYPE_CHECKING:
    from autotune.fleet.service import NodeStatus

router = APIRouter(route_class=GuardedRoute, tags=["fleet"])

Pool = Annotated[Text, Query(description="Only of this pool.")]


class MeasurementKind(StrEnum):
    """What was measured."""

    COLLECTIVE = "collective"
    LAYER = "layer"
    STEP = "step"


@router.get("/nodes", responses=answer(200, NodePage))
def list_nodes(request: Request, pool: Pool = None, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Json:
    """List the registered nodes: state and why, what holds each, when it was last heard of."""
    parts = parts_of(request)
    now, found = parts.store.now(), after_name(parts.service.nodes(pool), _name, after, limit)
    return page(request, "nodes", found, limit, cursor=_name, data=lambda status: _node(status, now))


@router.get("/nodes/{name}", responses=answer(200, NodeAnswer) | problems(404))
def show_node(request: Request, name: PathName) -> Json:
    """Show one node, with its newest incidents: failures by its fault, slow health probes, ranks that straggle."""
    parts = parts_of(request)
    pool = parts.store.node(name).pool
    status = next(status for status in parts.service.nodes(pool) if status.node.name == name)
    incidents = [incident.to_data() for incident in parts.store.incidents(name)]
    return Json({"node": _node(status, parts.store.now()), "incidents": incidents})


@router.delete("/nodes/{name}", responses=answer(200, NodeForgotten) | problems(404, 409))
def forget_node(request: Request, name: PathName) -> Json:
    """Take a dead node out of the list. Refused while it lives or a job holds it; what it measured stays."""
    parts_of(request).service.forget(name)
    return Json({"node": name})


@router.post("/nodes/{name}/quarantine", responses=answer(200, NodeChanged) | problems(404))
def quarantine_node(
    request: Request, name: PathName, body: Annotated[QuarantineBody, Body(openapi_examples=QUARANTINES)]
) -> Json:
    """Give a node no more jobs until it is released. What runs on it goes on."""
    reason = f"{body.reason} (by {principal_of(request).name})"
    return _changed(parts_of(request).service.quarantine(name, reason))


@router.post("/nodes/{name}/release", responses=answer(200, NodeChanged) | problems(404))
def release_node(request: Request, name: PathName) -> Json:
    """Let a node have jobs again, and forget its failures."""
    return _changed(parts_of(request).service.release(name))


@router.get("/jobs", responses=answer(200, JobPage))
def list_jobs(
    request: Request,
    pool: Pool = None,
    tuning: Annotated[
        str | None, Query(min_length=4, max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="Only of this tuning.")
    ] = None,
    state: Annotated[
        list[JobState] | None, Query(max_length=4, description="Default: all that have not ended.")
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> Json:
    """List jobs, oldest first: which nodes they hold, how far they are, how they ended."""
    store = parts_of(request).store
    tuning_id = None if tuning is None else store.tuning(tuning).id
    states = state or [each for each in JobState if each is not JobState.ENDED]
    found = store.jobs(pool=pool, tuning_id=tuning_id, states=states, after=after, limit=limit + 1)
    return page(request, "jobs", found, limit, cursor=lambda job: job.id, data=Job.to_data)


@router.get("/measurements", responses=answer(200, MeasurementPage))
def list_measurements(
    request: Request,
    kind: Annotated[MeasurementKind, Query(description="What was measured.")],
    cluster: Annotated[
        str | None, Query(pattern=r"^[0-9a-f]{16}$", description="Only of the cluster with this key.")
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: AfterNumber = None,
) -> Json:
    """List what probes measured, oldest first, with the environment it was measured in."""
    store = parts_of(request).store
    rows = store.measurements_page(kind.value, cluster_key=cluster, after=after or 0, limit=limit + 1)
    return page(request, "measurements", rows, limit, cursor=lambda row: row["id"], data=_plain)


def _changed(node: Node) -> Json:
    return Json({"node": node.name, "state": node.state.value, "reason": node.reason})


def _name(status: NodeStatus) -> str:
    return status.node.name


def _node(status: NodeStatus, now: datetime) -> dict[str, Any]:
    age_s = max(0.0, (now - status.node.heartbeat_at).total_seconds())
    more = {"obstacle": status.obstacle, "job": status.job_id or None, "heartbeat_age_s": age_s}
    return {**status.node.to_data(), **more}


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the database as JSON has it."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
