"""A tuning's log as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import anyio
from fastapi import Header
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from autotune.api.parts import Parts, Streams
from autotune.specs import TuningEvent
from autotune.tuning.fleet_ports import FleetStore

POLL_S = 0.5
KEEP_ALIVE_S = 15
BATCH = 200
MOST_STREAMS = 200
"""Each asks the database twice a second: more of them would crowd out the requests."""

LastEventId = Annotated[
    int | None, Header(ge=0, le=2**53, description="The id of the last event that came: go on after it.")
]


async def event_stream(parts: Parts, tuning_id: str, *, after: int) -> Response:
    """The stream of events after `after`; 204, which tells a browser to stay away, where none will come any more.

    Raises:
        UnknownNameError: no such tuning.
        HTTPException: 503, too many streams are open.
    """
    tuning = await run_in_threadpool(parts.store.tuning, tuning_id)
    found, ended = await run_in_threadpool(_poll, parts.store, tuning.id, after)
    if ended and not found:
        return Response(status_code=204)
    if parts.streams.open >= MOST_STREAMS:
        raise HTTPException(503, f"{MOST_STREAMS} streams are open already", {"Retry-After": "5"})
    events = _events(parts.store, tuning.id, after, parts.streams)
    return EventSourceResponse(events, ping=KEEP_ALIVE_S, ping_message_factory=_keep_alive)


async def _events(store: FleetStore, tuning_id: str, after: int, streams: Streams) -> AsyncIterator[ServerSentEvent]:
    streams.open += 1
    try:
        while True:
            found, ended = await run_in_threadpool(_poll, store, tuning_id, after)
            for event in found:
                after = event.id
                yield ServerSentEvent(data=event.to_json(), event=event.kind.value, id=str(event.id))
            if ended:
                return
            if len(found) < BATCH:
                await anyio.sleep(POLL_S)
    finally:
        streams.open -= 1


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
