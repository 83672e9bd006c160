"""Runs the app, which is what `autotune serve` does, and the edge around it."""

from __future__ import annotations

import gc
import sys
import time

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotune.api.access import is_loopback
from autotune.api.metrics import Metrics
from autotune.api.problems import problem, unexpected
from autotune.errors import InputError
from autotune.ports.fleet import FleetStore
from autotune.specs import Role

DRAIN_S = 5
"""How long answers may go on after SIGTERM; streams of events end at once and are resumed elsewhere."""

TURN_S = 0.0005
"""How long a thread waits until the one that has the interpreter must hand it over; Python's default is ten times that.
The thread that stores requests needs it back after each of a few statements, while the event loop reads new requests:
with the default it waited longer for its turn than it worked."""

COLLECT_AFTER = 10_000
"""Objects made before the youngest are looked through; 700 by default, which is reached by every few requests."""


def require_key(store: FleetStore, host: str, *, open_locally: bool) -> None:
    """Refuses to listen while nobody could be let in, or everybody beyond this machine. Raises InputError."""
    if open_locally and not is_loopback(host):
        raise InputError("--host", host, "127.0.0.1 with --open-to-this-machine")
    if not open_locally and not any(store.has_role(role) for role in Role):
        raise InputError(
            "API key",
            None,
            "make the first one with `autotune keys create NAME --role admin`, or take requests of this machine "
            "without one by --open-to-this-machine",
        )


def run(app: FastAPI, *, host: str, port: int) -> None:
    """Listens until SIGTERM or Ctrl-C. Raises InputError for an address that cannot be listened on."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="info", access_log=False, server_header=False, date_header=True,
        proxy_headers=False, timeout_graceful_shutdown=DRAIN_S, h11_max_incomplete_event_size=64 * 1024,
    )  # fmt: skip
    _spare_what_stays()
    sys.setswitchinterval(TURN_S)
    uvicorn.Server(config).run()


def _spare_what_stays() -> None:
    """Takes what was made until now out of garbage collection: to look through it stops all requests for 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


MAX_BODY_BYTES = 2**20
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TOO_LARGE = f"a body of at most {MAX_BODY_BYTES} bytes is taken"


class Edge:
    """ASGI middleware around everything else: size of bodies, headers of every answer, latency, the last catch.

    Plain, because starlette's convenient kind costs a task a request.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET is; the server leaves the body out
            scope = {**scope, "method": "GET"}
        started, status = time.perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in present)]
            await send(message)

        try:
            await self._guarded(scope, receive, send_on)
        except Exception as error:
            if status:  # the answer has begun: all that is left is to break it off
                raise
            await unexpected(error, scope["path"])(scope, receive, send_on)
        finally:
            self._metrics.request(scope, status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        got = 0

        async def receive_on() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > MAX_BODY_BYTES:  # sent in pieces, without a length
                raise HTTPException(413, TOO_LARGE)
            return message

        await self._app(scope, receive_on, send)


def _too_large() -> ASGIApp:
    return problem(413, "content-too-large", TOO_LARGE, {"Connection": "close"}, what="body", allowed=TOO_LARGE)
