"""A tuning's log as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import anyio
from fastapi import Header
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from autotune.api.parts import Parts, Streams
from autotune.ports.fleet import FleetStore
from autotune.specs import TuningEvent

POLL_S = 0.5
KEEP_ALIVE_S = 15
BATCH = 200
MAX_STREAMS = 200
"""Each asks the database twice a second: more of them would crowd out the requests."""

MAX_OF_ONE = 40
"""Of one principal, so that he does not take the places of all others."""

LONGEST_S = 600.0
"""Then a stream ends, and a client that comes again shows its key again: it may have been revoked meanwhile."""

EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string", "description": "For Last-Event-ID."},
        "event": {"$ref": "#/components/schemas/EventKind"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/TuningEvent"},
        },
    },
}
RETRY = {"Retry-After": "5"}
LastEventId = Annotated[
    int | None, Header(ge=0, le=2**53, description="The id of the last event that came: go on after it.")
]


async def event_stream(parts: Parts, principal: str, tuning_id: str, *, after: int) -> Response:
    """The stream of events after `after`; 204, which tells a browser to stay away, where none will come any more.

    Raises:
        UnknownNameError: no such tuning.
        HTTPException: 429, too many streams of this principal are open; 503, of all.
    """
    tuning = await run_in_threadpool(parts.store.tuning, tuning_id)
    found, ended = await run_in_threadpool(_poll, parts.store, tuning.id, after)
    if ended and not found:
        return Response(status_code=204)
    _require_place(parts.streams, principal)
    events = _events(parts, principal, tuning.id, after)
    return EventSourceResponse(events, ping=KEEP_ALIVE_S, ping_message_factory=_keep_alive)


def _require_place(streams: Streams, principal: str) -> None:
    if streams.open(principal) >= MAX_OF_ONE:
        raise HTTPException(429, f"{MAX_OF_ONE} streams of {principal} are open already", RETRY)
    if streams.open() >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} streams are open already", RETRY)


async def _events(parts: Parts, principal: str, tuning_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    over_at = time.monotonic() + LONGEST_S
    with parts.streams.one_more(principal):
        while True:
            found, ended = await run_in_threadpool(_poll, parts.store, tuning_id, after)
            for event in found:
                after = event.id
                yield ServerSentEvent(data=event.to_json(), event=event.kind.value, id=str(event.id))
            if ended or time.monotonic() >= over_at:
                return
            if len(found) < BATCH:
                await anyio.sleep(POLL_S)


def _poll(store: FleetStore, tuning_id: str, after: int) -> tuple[Sequence[TuningEvent], bool]:
    """The next events, and whether there will be no others."""
    found = store.events(tuning_id, after=after, limit=BATCH)
    if found or not store.tuning(tuning_id).state.ended:
        return found, False
    # Its last events may have been written since they were read, but none is after its end.
    found = store.events(tuning_id, after=after, limit=BATCH)
    return found, len(found) < BATCH


def _keep_alive() -> ServerSentEvent:
    """A comment: proxies see a living stream, clients nothing."""
    return ServerSentEvent(comment="keep-alive")
