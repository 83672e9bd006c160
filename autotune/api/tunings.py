"""Tunings: asked for, listed, shown, withdrawn; and their trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from autotune.api.access import GuardedRoute
from autotune.api.answers import Json, Submitted, TrialPage, TuningAnswer, TuningPage
from autotune.api.events import EVENT_SCHEMA, LastEventId, event_stream
from autotune.api.examples import EVENT, TUNING_REQUESTS
from autotune.api.openapi import answer, problems
from autotune.api.parts import Parts, parts_of, principal_of
from autotune.api.requests import (
    DEFAULT_LIMIT,
    After,
    AfterNumber,
    Limit,
    PathId,
    Text,
    TuningBody,
    TuningRequest,
    find_cluster,
    find_model,
    find_workload,
    given_model,
    page,
)
from autotune.api.sharing import require_bounded
from autotune.fleet.eligibility import offer_in
from autotune.fleet.keys import LOCAL
from autotune.fleet.service import submission_of
from autotune.search.space import runtime_of
from autotune.specs import ClusterSpec, ModelSpec, Role, Space, Tuning, TuningState, Workload
from autotune.tuning.report import submitted_answer, trial_data, tuning_answer, tuning_row

router = APIRouter(route_class=GuardedRoute, tags=["tunings"])

LOCATION = {"Location": "The tuning's path."}
JUDGED = {"model", "cluster", "nodes", "workload", "space", "command"}
"""Of a request: what decides whether it can lead to a plan."""

MAX_SHARED_BYTES = 2**13

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Sent again with the same body it gives the tuning of the first time, and makes none.",
    ),
]


@router.post(
    "/tunings",
    status_code=201,
    responses=answer(201, Submitted, LOCATION) | answer(200, Submitted, LOCATION) | problems(409),
)
async def submit(
    request: Request,
    body: Annotated[TuningBody, Body(openapi_examples=TUNING_REQUESTS)],
    idempotency_key: IdempotencyKey = None,
) -> Json:
    """Ask for a tuning.

    It is stored before the answer is sent. Requests that ask for the same share one tuning: then the answer is 200, and
    `created` is false. A request that no plan can fulfil is refused at once, with the reason.
    """
    parts, principal = parts_of(request), principal_of(request)
    model = given_model(body.model)
    if model is None:
        model = await run_in_threadpool(find_model, parts.store, body.model)
    cluster, workload, space = await _meant(parts, body, model)
    submission = submission_of(
        model,
        cluster,
        workload,
        space=space,
        budget=body.budget,
        seed=body.seed,
        cold=body.cold,
        sampler=body.sampler,
        principal=principal.name,
        idempotency_key=idempotency_key,
    )
    tuning, created, place = await parts.submissions.ask(submission)
    # It is stored: nobody waits until the broker has taken the message, least of all while it is away.
    begin = BackgroundTask(parts.beginnings.ask, tuning.id) if created else None
    location = {"Location": f"/tunings/{tuning.id}"}
    told = submitted_answer(tuning, created=created, place=place)
    return Json(told, 201 if created else 200, location, background=begin)


@router.get("/tunings", responses=answer(200, TuningPage))
def list_tunings(
    request: Request,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
    state: Annotated[TuningState | None, Query(description="Only tunings in this state.")] = None,
    principal: Annotated[Text, Query(description="Only theirs.")] = None,
) -> Json:
    """List tunings, newest first, each with its best plan so far."""
    parts = parts_of(request)
    found = parts.store.tunings_page(limit=limit + 1, before=after, state=state, principal=principal)
    places = _places(parts, found)
    row = partial(_row, parts, places)
    return page(request, "tunings", found, limit, cursor=lambda each: each.id, data=row)


@router.get("/tunings/{tuning_id}", responses=answer(200, TuningAnswer) | problems(404))
def show_tuning(request: Request, tuning_id: PathId) -> Response:
    """Show one tuning: its request, where it stands, all its trials, the best plan and why it is the best."""
    parts = parts_of(request)
    tuning = parts.store.tuning(tuning_id)

    def compute() -> bytes:
        return Json.of(tuning_answer(parts.store, tuning, _places(parts, [tuning]).get(tuning.id)))

    body = parts.answers.get(("tuning", *version_of(tuning)), compute) if tuning.state.ended else compute()
    return Response(body, media_type=Json.media_type)


@router.delete("/tunings/{tuning_id}", responses=answer(200, Submitted) | problems(404, 409))
def cancel_tuning(
    request: Request,
    tuning_id: PathId,
    force: Annotated[bool, Query(description="Whoever else wants it. Only for an admin.")] = False,
) -> Json:
    """Take back a request for a tuning.

    It is cancelled once everybody who asked for it has taken that back, or with `force`; its nodes are free within
    seconds. An answer in another state than cancelled says that somebody else still wants it. An admin can also take
    back requests that were made without a key. Where only others want the tuning, error 409 names them.
    """
    parts, principal = parts_of(request), principal_of(request)
    is_admin = principal.role.includes(Role.ADMIN)
    if force and not is_admin:
        raise HTTPException(403, f"force needs the role admin, and {principal.name} has {principal.role.value}")
    tuning = parts.store.tuning(tuning_id)
    if tuning.state.ended and tuning.state is not TuningState.CANCELLED:
        raise HTTPException(409, f"it has ended already ({tuning.state.value})")
    tuning = parts.service.cancel(tuning.id, principal.name, also=LOCAL if is_admin else None, force=force)
    return Json(submitted_answer(tuning, created=False, place=_places(parts, [tuning]).get(tuning.id)))


@router.get("/tunings/{tuning_id}/trials", responses=answer(200, TrialPage) | problems(404))
def list_trials(request: Request, tuning_id: PathId, limit: Limit = DEFAULT_LIMIT, after: AfterNumber = None) -> Json:
    """List the trials of a tuning by number: measured beside estimated, and how each one failed that did."""
    store = parts_of(request).store
    trials = store.trials(store.tuning(tuning_id).id)
    found = [trial for trial in trials if after is None or trial.number > after][: limit + 1]
    return page(request, "trials", found, limit, cursor=lambda each: each.number, data=trial_data)


@router.get(
    "/tunings/{tuning_id}/events",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events, until the tuning has ended or ten minutes are over. The schema is of "
            "each event.",
            "content": {"text/event-stream": {"schema": EVENT_SCHEMA, "example": EVENT}},
        },
        204: {"description": "The tuning has ended, and everything was sent before: do not reconnect."},
        **problems(404),
    },
)
async def stream_events(request: Request, tuning_id: PathId, last_event_id: LastEventId = None) -> Response:
    """Follow a tuning: every change of state, every trial, probe and job, as server-sent events.

    With `Last-Event-ID` the stream goes on after that event: nothing is missed, nothing comes twice.
    """
    principal = principal_of(request).name
    return await event_stream(parts_of(request), principal, tuning_id, after=last_event_id or 0)


async def _meant(parts: Parts, body: TuningRequest, model: ModelSpec) -> tuple[ClusterSpec, Workload, Space]:
    """What a request means that can lead to a plan: cluster, workload, space. Judged once for all who ask at a time.

    The model is found before: what was stored a moment ago is what is tuned.
    """
    judged = body.model_copy(update={"model": model}).model_dump_json(include=JUDGED)

    def judge() -> tuple[ClusterSpec, Workload, Space]:
        cluster = find_cluster(parts.store, body.cluster, body.nodes)
        workload, space = find_workload(model, cluster, body.workload), body.space
        if body.command is not None:
            offer = offer_in(parts.store.nodes(cluster.name), body.command, cluster.nodes)
            offer.check_model(model)
            given = {name for name, value in body.workload if value is not None}
            workload, space = offer.workload_of(workload, given=given), offer.narrowed(space)
        require_bounded(parts.answers, model, cluster, workload, runtime_of(workload))
        parts.service.check(model, cluster, workload, space)
        return cluster, workload, space

    if len(judged) > MAX_SHARED_BYTES:  # thousands of these would fill the memory
        return await run_in_threadpool(judge)
    found: tuple[ClusterSpec, Workload, Space] = await parts.shared.get(
        ("asked", judged), lambda: run_in_threadpool(judge)
    )
    return found


def version_of(tuning: Tuning) -> tuple[object, ...]:
    """What changes whenever a tuning or one of its finished trials does."""
    return (tuning.id, tuning.state, tuning.updated_at, tuning.gpu_s_spent)


def _places(parts: Parts, tunings: Sequence[Tuning]) -> dict[str, int]:
    """The places of those that are queued."""
    queued = [tuning.id for tuning in tunings if tuning.state is TuningState.QUEUED]
    return parts.store.queue_places(queued) if queued else {}


def _row(parts: Parts, places: Mapping[str, int], tuning: Tuning) -> dict[str, Any]:
    def compute() -> dict[str, Any]:
        trials = () if tuning.state is TuningState.QUEUED else parts.store.trials(tuning.id)
        return tuning_row(tuning, trials, places.get(tuning.id))

    if tuning.state.ended:
        row: dict[str, Any] = parts.answers.get(("row", *version_of(tuning)), compute)
        return row
    return compute()
