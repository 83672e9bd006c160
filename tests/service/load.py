"""Many clients that ask of an API at the same time, and how long each answer took."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from crew import MAX_TRIALS, POOL

from autotune.catalog import smallest


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

    An answer that does not come is an error. The clients' own garbage waits: to collect it would hold all of them up.
    """
    waiting, answers = deque(requests), list[Answered]()
    began = threading.Barrier(clients)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        headers = {"Authorization": f"Bearer {secrets[number % len(secrets)]}"} if secrets else {}
        try:
            with closing(HTTPConnection(urlsplit(url).netloc, timeout=120)) as connection:
                began.wait()
                while waiting:
                    answers.append(_ask(connection, waiting.popleft(), headers))
        except IndexError:  # another client took the last one
            pass
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    with _uncollected():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(answers) == len(requests)
    return answers


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _ask(connection: HTTPConnection, asked: Asked, headers: dict[str, str]) -> Answered:
    body = None if asked.body is None else json.dumps(asked.body)
    kind = {} if body is None else {"Content-Type": "application/json"}
    start_s = time.perf_counter()
    connection.request(asked.method, asked.path, body, {**headers, **kind})
    response = connection.getresponse()
    text = response.read()
    time_s = time.perf_counter() - start_s
    return Answered(asked=asked, status=response.status, data=json.loads(text), time_s=time_s)


def percentile_s(answers: Sequence[Answered], share: float) -> float:
    """The time within which that share of the answers came (nearest rank)."""
    times = sorted(answer.time_s for answer in answers)
    return times[max(math.ceil(share * len(times)) - 1, 0)]
