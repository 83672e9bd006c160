"""The edge of the app, around everything else: size of bodies, headers of every answer, latency, the last catch."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotune.api.metrics import Metrics
from autotune.api.problems import problem, unexpected

MOST_BODY_BYTES = 2**20
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TOO_LARGE = f"a body of at most {MOST_BODY_BYTES} bytes is taken"


class Edge:
    """ASGI middleware. Plain, because starlette's convenient kind costs a task a request."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
        if announced.isdigit() and int(announced) > MOST_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        got = 0

        async def receive_on() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > MOST_BODY_BYTES:  # sent in pieces, without a length
                raise HTTPException(413, TOO_LARGE)
            return message

        await self._app(scope, receive_on, send)


def _too_large() -> ASGIApp:
    return problem(413, "content-too-large", TOO_LARGE, {"Connection": "close"}, what="body", allowed=TOO_LARGE)
