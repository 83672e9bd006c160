"""Runs the app, which is what `autotune serve` does, and the edge around it."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import sys
import time
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotune.api.access import is_loopback
from autotune.api.connections import MAX_CONNECTIONS, RESTING, Connection, Crowd
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


KERNEL_BYTES = 128 * 1024
"""What the kernel keeps of each connection in each direction (it takes twice that); by default it is megabytes, and
counts as the API's memory in a container."""

OTHER_FILES = 256
"""Left for the database, the broker and the log, out of the files that a process may have open."""


class Server(uvicorn.Server):
    """uvicorn's server, with bounded connections.

    Args:
        app: what `create_app` made.
        most: connections at a time.
        options: uvicorn's.
    """

    def __init__(self, app: FastAPI, *, most: int = MAX_CONNECTIONS, **options: Any) -> None:
        self._crowd = Crowd(app.state.parts.metrics, most)
        connection: Any = partial(Connection, crowd=self._crowd)
        super().__init__(uvicorn.Config(app, http=connection, ws="none", access_log=False, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, with buffers that accepted connections inherit."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            self._crowd.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def run(app: FastAPI, *, host: str, port: int) -> None:
    """Listens until SIGTERM or Ctrl-C. Raises InputError for an address that cannot be listened on."""
    files = _open_files()
    most = min(MAX_CONNECTIONS, max(files - OTHER_FILES, files // 2))
    server = Server(
        app, most=most, host=host, port=port, log_level="info", server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=DRAIN_S,
    )  # fmt: skip
    _spare_what_stays()
    sys.setswitchinterval(TURN_S)
    server.run()


def _open_files() -> int:
    """Files that this process may have open at a time, raised as far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


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
MAX_BODIES_BYTES = 64 * 2**20
"""Of all bodies whose requests are not answered yet: many slow ones would fill the memory."""

TOO_LARGE = f"a body of at most {MAX_BODY_BYTES} bytes is taken"


class Edge:
    """ASGI middleware around everything else: size of bodies, headers of every answer, latency, the last catch.

    Plain, because starlette's convenient kind costs a task a request.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics, self._bodies_bytes = app, metrics, 0
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
                if status == 429:
                    scope["state"][RESTING] = True
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
            size = len(message.get("body", b""))
            got += size
            self._bodies_bytes += size
            if got > MAX_BODY_BYTES:  # sent in pieces, without a length
                raise HTTPException(413, TOO_LARGE)
            if self._bodies_bytes > MAX_BODIES_BYTES:
                raise HTTPException(503, "too much is being sent at the moment", {"Retry-After": "5"})
            return message

        try:
            await self._app(scope, receive_on, send)
        finally:
            self._bodies_bytes -= got


def _too_large() -> ASGIApp:
    return problem(413, "content-too-large", TOO_LARGE, {"Connection": "close"}, what="body", allowed=TOO_LARGE)
