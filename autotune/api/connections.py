"""Connections: how many there may be, how much each may send, and how long it may take.

uvicorn has no such bounds on httptools, its faster parser: there one connection could send headers until the memory
was full, and a thousand half requests kept everybody else out. What is closed here is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from enum import Enum, StrEnum
from functools import cache
from ipaddress import IPv6Address, ip_address
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from autotune.api.metrics import Metrics
from autotune.api.problems import problem

MAX_CONNECTIONS = 1024
"""In all. A fleet's clients and a proxy's pool need tens of them, and each may cost its request's head and body."""

MAX_OF_ONE = 512
"""From one address, which may be a proxy's; half, so that nobody takes the places of all others."""

MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_SENT_BYTES = 2 * 2**20
"""Of a body as it is sent, with chunk sizes and trailers: twice what api.server takes of it."""

MAX_PIPELINED = 16
"""Requests that may wait for the answer before theirs. Hardly any client sends even one."""

HEAD_S = 10.0
"""From the connection, or the first byte of a further request, to the end of its headers."""

BODY_S = 30.0
"""From the end of the headers to the end of the body: 1 MiB at 35 KiB/s."""

IDLE_S = 5.0
"""From an answer to the first byte of the next request."""

UNREAD_S = 30.0
READ_BYTES = 16 * 1024
"""A client that reads less of its answer than that in UNREAD_S does not read."""

LINGER_S = 1.0
"""From an answer that refuses to the end of the connection."""

REST_S = 1.0
"""A connection whose request came too soon (429) is not read for so long: else refusing would cost as much as asking
does, and could be asked for without end."""

PIECE_BYTES = 16 * 1024
"""Fed to the parser at a time. The bounds hold to one piece."""

LOG_EVERY_S = 10.0
RESTING = "autotune_resting"
"""In the state of a request whose connection is to rest after the answer."""

log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why a connection was closed by us."""

    LARGE_HEAD = "large_head"
    LARGE_BODY = "large_body"
    MALFORMED = "malformed"
    PIPELINED = "pipelined"
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    UNREAD = "unread"
    IDLE = "idle"
    CROWDED = "crowded"
    REFUSED = "refused"


TEXTS = {
    Reason.LARGE_HEAD: f"more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines of headers",
    Reason.LARGE_BODY: f"more than {MAX_SENT_BYTES} bytes of a body",
    Reason.MALFORMED: "no HTTP",
    Reason.PIPELINED: f"more than {MAX_PIPELINED} requests before the first answer, or any before one that refuses",
    Reason.SLOW_HEAD: f"headers that were not complete after {HEAD_S:.0f} s",
    Reason.SLOW_BODY: f"a body that was not complete after {BODY_S:.0f} s",
    Reason.UNREAD: f"an answer that was not read for {UNREAD_S:.0f} s",
    Reason.IDLE: "nothing was asked any more",
    Reason.CROWDED: "the longest without a request, where there were too many connections",
    Reason.REFUSED: "too many connections, all of them with a request",
}
ANSWERS = {
    Reason.LARGE_HEAD: (431, "headers-too-large"),
    Reason.MALFORMED: (400, "malformed"),
    Reason.SLOW_HEAD: (408, "timeout"),
    Reason.REFUSED: (503, "unavailable"),
}
"""Said before the connection is closed, unless the client waits for the answer to an earlier request, or has it."""


class Reading(Enum):
    """What of a request comes next."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class _RefusedError(Exception):
    """Raised through the parser, which would go on otherwise."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Crowd:
    """All connections of a server. Only the event loop's thread uses it.

    Args:
        metrics: counts them, and those that are closed.
        most: connections at a time, half of them from one address at most.
    """

    def __init__(self, metrics: Metrics, most: int = MAX_CONNECTIONS) -> None:
        self._metrics, self._most, self._most_of_one = metrics, most, min(MAX_OF_ONE, max(most // 2, 1))
        self._of: dict[str, dict[Connection, None]] = {}  # of each address, longest without a request first
        self._size = 0
        self._untold: dict[Reason, tuple[int, str]] = {}
        self._tell_at = 0.0

    def enter(self, connection: Connection) -> None:
        """Takes a new connection in; where there are too many, one that asks for nothing makes room, or it goes."""
        own = self._of.setdefault(connection.origin, {})
        own[connection] = None
        self._count(+1)
        if len(own) > self._most_of_one:
            self._make_room([own], connection)
        elif self._size > self._most:
            self._make_room(sorted(self._of.values(), key=len, reverse=True), connection)

    def leave(self, connection: Connection) -> None:
        """Forgets a connection; it may have been forgotten before."""
        own = self._of.get(connection.origin, {})
        if connection in own:
            del own[connection]
            self._count(-1)
            if not own:
                del self._of[connection.origin]

    def asked(self, connection: Connection) -> None:
        """Notes that a connection has a request: it is the last one to make room."""
        own = self._of.get(connection.origin, {})
        if connection in own:
            del own[connection]
            own[connection] = None

    def note(self, reason: Reason, origin: str) -> None:
        """Counts a connection that is closed; tells of it soon, together with others."""
        self._metrics.closed(reason.value)
        if reason is not Reason.IDLE:  # which is as it should be
            self._untold[reason] = (self._untold.get(reason, (0, ""))[0] + 1, origin)

    def sweep(self, now: float) -> None:
        """Closes what has taken too long, and tells of what was closed; called about once a second."""
        for connection in [each for own in self._of.values() for each in own]:
            connection.check(now)
        if self._untold and now >= self._tell_at:
            for reason, (count, origin) in self._untold.items():
                log.warning("%d connections closed: %s; the last one was from %s", count, TEXTS[reason], origin)
            self._untold.clear()
            self._tell_at = now + LOG_EVERY_S

    def _make_room(self, crowds: Collection[dict[Connection, None]], for_one: Connection) -> None:
        waiting = (each for crowd in crowds for each in crowd if each.waits and each is not for_one)
        victim = next(waiting, None)
        if victim is None:
            for_one.refuse(Reason.REFUSED)
        else:
            victim.refuse(Reason.CROWDED)

    def _count(self, change: int) -> None:
        self._size += change
        self._metrics.connections(self._size)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, bounded in bytes and seconds."""

    def __init__(self, *args: Any, crowd: Crowd, **options: Any) -> None:
        super().__init__(*args, **options)
        self.timeout_keep_alive = IDLE_S  # type: ignore[assignment]  # uvicorn declares whole seconds
        self._crowd, self.origin = crowd, "none"
        self._reading, self._taken_bytes, self._deadline = Reading.HEAD, 0, math.inf
        self._is_over = False  # nothing that comes is read any more
        self._answering: RequestResponseCycle | None = None
        self._unsent_bytes, self._unread_at = 0, math.inf

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: nothing was asked, or not all of it has come."""
        return not self.transport.is_closing() and (self._reading is Reading.BODY or not self._is_answering)

    @property
    def _is_answering(self) -> bool:
        return bool(self.pipeline) or (self._answering is not None and not self._answering.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self.origin = origin_of(self.client[0]) if self.client else "none"
        self._deadline = self.loop.time() + HEAD_S
        self._crowd.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request that is being answered, which uvicorn forgets where another one came after it."""
        self._crowd.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parses what came, piece by piece, until that is too much."""
        self._unset_keepalive_if_required()
        if self._reading is Reading.NOTHING:
            self._expect(Reading.HEAD, HEAD_S)
        for start in range(0, len(data), PIECE_BYTES):
            if self._is_over:
                return
            piece = data[start : start + PIECE_BYTES]
            self._taken_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                # We change to no other protocol. The parser took the request to have no body, so nothing after it
                # can be told apart: it is answered, and no other one is read.
                self.cycle.keep_alive, self._is_over = False, True
            except httptools.HttpParserError as error:
                cause = error.__context__
                self.refuse(cause.reason if isinstance(cause, _RefusedError) else Reason.MALFORMED)
            else:
                if self._reading is Reading.HEAD and self._taken_bytes > MAX_HEAD_BYTES:
                    self.refuse(Reason.LARGE_HEAD)
                elif self._reading is Reading.BODY and self._taken_bytes > MAX_SENT_BYTES:
                    self.refuse(Reason.LARGE_BODY)

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        if self._reading is not Reading.HEAD:
            self._expect(Reading.HEAD, HEAD_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header, and for each trailer, which nobody reads."""
        if self._reading is Reading.BODY:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise _RefusedError(Reason.LARGE_HEAD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser before the body."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedError(Reason.PIPELINED)
        super().on_headers_complete()
        self._expect(Reading.BODY, BODY_S)
        self._crowd.asked(self)

    def on_message_complete(self) -> None:
        """Called by the parser after the body."""
        self._expect(Reading.NOTHING)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Called after each answer."""
        rests = self._answering is not None and self._answering.scope["state"].get(RESTING)
        if rests and self.pipeline:
            self.pipeline.clear()
            self._end(Reason.PIPELINED)
            self.transport.close()
        super().on_response_complete()
        if rests and not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(REST_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Called where no other request came for some seconds."""
        if not self.transport.is_closing():
            self._crowd.note(Reason.IDLE, self.origin)
        super().timeout_keep_alive_handler()

    def resume_writing(self) -> None:
        """Called by the transport when the client has read most of what waited."""
        super().resume_writing()
        self._unsent_bytes = 0

    def check(self, now: float) -> None:
        """Closes it where the client has taken too long, to send or to read."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or not 0 < self._unsent_bytes < unsent + READ_BYTES:
            self._unsent_bytes, self._unread_at = unsent, now + UNREAD_S
        elif now >= self._unread_at:
            self._abort(Reason.UNREAD)
            return
        if now >= self._deadline:
            if self.flow.read_paused:  # it is we who do not read
                self._deadline = now + HEAD_S
            else:
                self.refuse(Reason.SLOW_HEAD if self._reading is Reading.HEAD else Reason.SLOW_BODY)

    def refuse(self, reason: Reason) -> None:
        """Closes it, with an answer that says why where none is under way."""
        is_asked = self._is_answering or self._reading is Reading.BODY
        if reason not in ANSWERS or is_asked or self.transport.is_closing():
            self._abort(reason)
            return
        self._end(reason)
        self.transport.write(_answer(reason))
        if reason is Reason.REFUSED:
            self.transport.close()
        else:  # closed at once, what the client still sends would take the answer from it
            self.transport.write_eof()
            self.flow.pause_reading()
            self.loop.call_later(LINGER_S, self.transport.abort)

    def _abort(self, reason: Reason) -> None:
        self._end(reason)
        self._crowd.leave(self)
        self.transport.abort()

    def _end(self, reason: Reason) -> None:
        if not self._is_over or reason is Reason.UNREAD:
            self._crowd.note(reason, self.origin)
        self._is_over, self._deadline = True, math.inf

    def _expect(self, what: Reading, within_s: float = math.inf) -> None:
        self._reading, self._taken_bytes, self._deadline = what, 0, self.loop.time() + within_s


@cache
def _answer(reason: Reason) -> bytes:
    status, kind = ANSWERS[reason]
    answer = problem(status, kind, f"refused: {TEXTS[reason]}", {"Connection": "close"})
    headers = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
    return STATUS_LINE[answer.status_code] + headers + b"\r\n" + bytes(answer.body)


def origin_of(host: str) -> str:
    """An address as whose connections and requests are counted: an IPv6 network of 64 bits is one client's."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(IPv6Address(int(address) >> 64 << 64))
