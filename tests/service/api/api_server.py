"""A running API and its clients, for tests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

import httpx
import pytest
from databases import KINDS
from fastapi import FastAPI

from autotune.api import server
from autotune.fleet.keys import create_key
from autotune.ports.fleet import FleetStore
from autotune.specs import Role

TIMEOUT_S = 60.0
ON_BOTH = pytest.mark.parametrize("url", KINDS, indirect=True)
"""For tests that ask for much of what the API asks of a store. What both kinds answer the contract tests compare."""

TINY: dict[str, Any] = {"model": "tiny", "cluster": "pair", "workload": {"seq_len": 64, "global_batch": 16}}
"""A request that fits on the pool of the tests."""


class Api:
    """A server on this machine and one key of each role, made when it is first asked for."""

    def __init__(self, url: str, store: FleetStore) -> None:
        self.url, self.store = url, store
        self._secrets: dict[Role, str] = {}
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False)

    def secret(self, role: Role) -> str:
        """The secret of the key named after its role."""
        if role not in self._secrets:
            self._secrets[role] = create_key(self.store, role.value, role.value).secret
        return self._secrets[role]

    def close(self) -> None:
        """Closes the client's connections."""
        self._client.close()

    def headers(self, role: Role | None) -> dict[str, str]:
        """What shows the key of that role, or none."""
        return {} if role is None else {"Authorization": f"Bearer {self.secret(role)}"}

    def request(self, method: str, path: str, role: Role | None = Role.ADMIN, **options: Any) -> httpx.Response:
        """One request under a role; options are httpx's."""
        headers = {**self.headers(role), **options.pop("headers", {})}
        return self._client.request(method, path, headers=headers, **options)


class StartApi(Protocol):
    """Starts an API with options of create_app."""

    def __call__(self, **options: Any) -> Api: ...


class Server(server.Server):
    """Ends at once: uvicorn's own looks every 0.1 s whether it is to."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)


@contextmanager
def serving(app: FastAPI, store: FleetStore) -> Iterator[Api]:
    """Serves an app by uvicorn in a thread, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = Server(app, log_config=None, timeout_graceful_shutdown=1)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        # It listens already: who comes early waits.
        with closing(Api(f"http://127.0.0.1:{listener.getsockname()[1]}", store)) as api:
            yield api
    finally:
        running.should_exit = True
        thread.join()


def assert_problem(answer: httpx.Response, status: int, kind: str, *words: str) -> dict[str, Any]:
    """The answer is a problem document of that kind that says these words; returns it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    data: dict[str, Any] = answer.json()
    assert data["type"] == f"urn:autotune:problem:{kind}"
    assert data["status"] == status
    assert data["title"]
    for word in words:
        assert word in answer.text
    return data
