"""A client that means harm to an API: `python -m benchmarks.hostile_client URL KEY` until SIGTERM. Prints JSON.

It never rests: endless headers and bodies, half requests, bodies that drip, streams and answers that are never read,
and requests that no route takes, each by many connections at once. Its session is lowered where the load benchmark
starts it, since it stands for other machines; prints how often it did what.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

HEAD = b"GET /best HTTP/1.1\r\nHost: us\r\n"
LINES = b"".join(b"x-%d: y\r\n" % number for number in range(4096))
MANY = {
    "endless_headers": 20,
    "endless_bodies": 10,
    "half_requests": 600,
    "slow_bodies": 40,
    "unread": 20,
    "strays": 40,
}
"""Connections at a time."""


class Hostile:
    """The connections of one hostile client.

    Args:
        url: of the API.
        key: with which it opens streams and sends bodies.
        tuning: whose events it follows without reading them.
    """

    def __init__(self, url: str, key: str, tuning: str) -> None:
        where = urlsplit(url)
        self._host, self._port = where.hostname or "", where.port or 80
        self._key, self._tuning = b"Authorization: Bearer " + key.encode() + b"\r\n", tuning.encode()
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        await asyncio.gather(*(self._again(name) for name, count in MANY.items() for _ in range(count)))

    async def _again(self, name: str) -> None:
        act: Callable[[socket.socket], Awaitable[None]] = getattr(self, f"_{name}")
        while True:
            with socket.socket() as connection, suppress(OSError):
                connection.setblocking(False)
                if name == "unread":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
                await act(connection)
            self.done[name] += 1

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, data)

    async def _heard(self, connection: socket.socket) -> bytes:
        return await asyncio.get_running_loop().sock_recv(connection, 65536)

    async def _endless_headers(self, connection: socket.socket) -> None:
        await self._send(connection, HEAD)
        sending = asyncio.create_task(self._flood(connection, LINES))
        with suppress(OSError):
            await self._heard(connection)
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending

    async def _endless_bodies(self, connection: socket.socket) -> None:
        await self._send(connection, b"POST /tunings HTTP/1.1\r\nHost: us\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self._flood(connection, b"10000\r\n" + b"y" * 65536 + b"\r\n")

    async def _flood(self, connection: socket.socket, piece: bytes) -> None:
        while True:
            await self._send(connection, piece)

    async def _half_requests(self, connection: socket.socket) -> None:
        await self._send(connection, HEAD)
        await self._heard(connection)

    async def _slow_bodies(self, connection: socket.socket) -> None:
        head = b"POST /tunings HTTP/1.1\r\nHost: us\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
        await self._send(connection, head + self._key + b"\r\n")
        while True:
            await self._send(connection, b" ")
            await asyncio.sleep(0.2)

    async def _unread(self, connection: socket.socket) -> None:
        await self._send(
            connection, b"GET /tunings/%s/events HTTP/1.1\r\nHost: us\r\n" % self._tuning + self._key + b"\r\n"
        )
        await asyncio.sleep(60)

    async def _strays(self, connection: socket.socket) -> None:
        while True:
            await self._send(connection, b"GET /nothing HTTP/1.1\r\nHost: us\r\n\r\n")
            if not await self._heard(connection):
                return
            self.done["strays"] += 1


async def main(url: str, key: str, tuning: str) -> None:
    """Runs until SIGTERM."""
    hostile, ended = Hostile(url, key, tuning), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    running = asyncio.create_task(hostile.run())
    await ended.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    print(json.dumps(hostile.done))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
