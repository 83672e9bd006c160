"""Many clients that ask of an API at the same time, and how long each answer took."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout
from crew import MAX_TRIALS, POOL

from autotune.catalog import smallest

PATIENCE = ClientTimeout(total=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    method: str
    path: str
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of it, and after how long."""

    asked: Asked
    status: int
    data: dict[str, Any]
    time_s: float


def submission(seed: int, nodes: int = 2) -> Asked:
    """A request for a tuning of the smallest model; another for each seed."""
    body = {
        "model": smallest().name, "cluster": POOL, "nodes": nodes, "seed": seed,
        "workload": {"seq_len": 64, "global_batch": 4}, "budget": {"max_trials": MAX_TRIALS},
    }  # fmt: skip
    return Asked(method="POST", path="/tunings", body=body)


def ask_all(url: str, requests: Sequence[Asked], clients: int, secrets: Sequence[str] = ()) -> list[Answered]:
    """Asks everything, by so many clients at once, each with a connection and one of the keys; no client rests.

    An answer that does not come is an error. The clients take turns in one thread: threads of their own would wait for
    the interpreter, some of them for long, and not for answers. Their garbage waits, or it would hold all of them up.
    """
    with _uncollected():
        answers = asyncio.run(_ask_all(url, requests, clients, secrets))
    assert len(answers) == len(requests)
    return answers


async def _ask_all(url: str, requests: Sequence[Asked], clients: int, secrets: Sequence[str]) -> list[Answered]:
    waiting, answers = deque(requests), list[Answered]()

    async def work(number: int) -> None:
        headers = {"Authorization": f"Bearer {secrets[number % len(secrets)]}"} if secrets else {}
        async with ClientSession(url, headers=headers, timeout=PATIENCE) as session:
            while waiting:
                answers.append(await _ask(session, waiting.popleft()))

    await asyncio.gather(*map(work, range(clients)))
    return answers


async def _ask(session: ClientSession, asked: Asked) -> Answered:
    start_s = time.perf_counter()
    async with session.request(asked.method, asked.path, json=asked.body) as response:
        text = await response.read()
    time_s = time.perf_counter() - start_s
    return Answered(asked=asked, status=response.status, data=json.loads(text), time_s=time_s)


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentile_s(answers: Sequence[Answered], share: float) -> float:
    """The time within which that share of the answers came (nearest rank)."""
    times = sorted(answer.time_s for answer in answers)
    return times[max(math.ceil(share * len(times)) - 1, 0)]
