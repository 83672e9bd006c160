"""Sharing: what many requests ask for at the same time is worked out once; answers are kept as long as they are true;
and what requests may make us compute is bounded."""

from __future__ import annotations

import time
from asyncio import Future, Task, create_task, current_task, get_running_loop, shield
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from cachetools import FIFOCache, cached
from starlette.exceptions import HTTPException

from autotune.errors import InputError, MissingMeasurementError, NothingFitsError
from autotune.search import space as bounds
from autotune.search.space import Runtime
from autotune.specs import ClusterSpec, ModelSpec, Workload

MAX_COMBINED = 64
"""Done in one go at most."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Combiner(Generic[Asked, Answer]):
    """One transaction for many: whoever comes while the last one is under way goes with the next.

    Used within one event loop, where waiting costs no thread. The work is done in one, beside those of the handlers:
    it does not wait for them.

    Args:
        work: answers each of what is asked, in the same order: with an answer, or with an exception for that one alone.
            What it raises is raised to all of them.
    """

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Answer | Exception]]) -> None:
        self._work, self._thread = work, CapacityLimiter(1)
        self._waiting: deque[tuple[Asked, Future[Answer]]] = deque()
        self._task: Task[None] | None = None

    async def ask(self, asked: Asked) -> Answer:
        """The answer, once it is there. Raises what `work` gave or raised."""
        future: Future[Answer] = get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._task is None:
            self._task = create_task(self._work_off())
        return await future

    async def _work_off(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(MAX_COMBINED, len(self._waiting)))]
                _tell(batch, await self._answers([asked for asked, _ in batch]))
        finally:
            self._task = None

    async def _answers(self, batch: Sequence[Asked]) -> Sequence[Answer | Exception]:
        try:
            return await run_sync(self._work, batch, limiter=self._thread)
        except Exception as error:  # noqa: BLE001 - handed to everybody who waits for it
            return [error] * len(batch)


def _tell(batch: Sequence[tuple[Asked, Future[Answer]]], answers: Sequence[Answer | Exception]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():  # whoever asked is gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


REFUSALS = (InputError, NothingFitsError, MissingMeasurementError)
ENTRY_BYTES = 4096
"""Counted for every kept answer, for its place beside what it says."""

OBJECT_BYTES = 8
"""Counted for each character that it takes to write an object down: measured, ours take 2 to 6."""


def size_bytes(*parts: Any) -> int:
    """About the memory that it takes to keep these: bodies, refusals, and objects of any kind."""
    return ENTRY_BYTES + sum(len(each) if isinstance(each, bytes) else OBJECT_BYTES * _written(each) for each in parts)


def _written(kept: Any) -> int:
    return len(repr(kept)) + (len(repr(vars(kept))) if isinstance(kept, Exception) else 0)


class Shared:
    """What was found a moment ago, for handlers that wait in the event loop: however many ask, it is looked for once.

    Only the loop's thread calls `get`; any thread may call `forget`.

    Args:
        max_bytes: of what is kept, by `size_bytes`, keys included; the oldest goes first.
        trust_s: how long that is taken for true without asking again.
    """

    def __init__(self, max_bytes: int, trust_s: float) -> None:
        self._trust_s, self._lock = trust_s, Lock()
        self._found = FIFOCache[Hashable, tuple[float, Any, int]](max_bytes, lambda kept: kept[2])
        self._asking: dict[Hashable, Task[Any]] = {}

    async def get(self, key: Hashable, find: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `find` gave, if it was asked within the last `trust_s` seconds; up to twice as old while it is asked.

        What it raises is raised to all who wait for it. That and None are not kept.
        """
        try:
            until, found, _ = self._found[key]
        except KeyError:  # `get` would ask twice, and somebody may forget in between
            until, found = 0.0, None
        now = time.monotonic()
        if now < until:
            return found
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = create_task(self._ask(key, find))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting for it
        return found if now < until + self._trust_s else await shield(task)

    async def _ask(self, key: Hashable, find: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        until = time.monotonic() + self._trust_s
        try:
            found = await find()
            with self._lock:
                if self._asking.get(key) is current_task():  # else something was changed meanwhile
                    self._keep(key, until, found)
            return found
        finally:
            with self._lock:
                if self._asking.get(key) is current_task():
                    del self._asking[key]

    def _keep(self, key: Hashable, until: float, found: Any) -> None:
        if found is None:
            self._found.pop(key, None)
            return
        with suppress(ValueError):  # too large to be kept
            self._found[key] = (until, found, size_bytes(key, found))

    def forget(self) -> None:
        """Asks for everything again, also for what is being looked for: something was changed here."""
        with self._lock:
            self._asking.clear()
            self._found.clear()


class Cache:
    """Answers for handlers in threads, each worked out by one thread at a time; refusals are answers too.

    Other errors are not kept, nor is what is larger than the whole.

    Args:
        kept: what keeps them, counted by `size_bytes`. The keys of an LRUCache hold everything that an answer depends
            on, as short digests, so that none is ever stale; a TTLCache takes answers for true for a while.
    """

    def __init__(self, kept: MutableMapping[Hashable, Any]) -> None:
        self._answer = cached(kept, key=lambda key, _: key, condition=Condition())(_found)

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The answer under `key`, computed if it is not there. Raises it where it is a refusal."""
        answer = self._answer(key, compute)
        if isinstance(answer, REFUSALS):
            raise _afresh(answer)
        return answer


def _found(_: Hashable, compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except REFUSALS as error:
        return _afresh(error)


def _afresh(error: Exception) -> Exception:
    """The same error, raised by nobody: one that was raised keeps all that was at hand where it was."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made


MAX_WAITING = 8
"""A fifth of the handlers' threads: the others answer what is quick, however many rankings are asked for."""

MAX_OF_ONE = 2
"""Of one principal, so that he does not take the places of all others."""

_turn, _counting, _waiting = Lock(), Lock(), Counter[str]()


@contextmanager
def one_at_a_time(principal: str) -> Iterator[None]:
    """Held while all plans of a request are weighed: more at once would only make each slower.

    Raises:
        HTTPException: 429, so many requests of this principal wait already; 503, so many of all that quick requests
            would find no thread.
    """
    with _counting:
        if _waiting[principal] >= MAX_OF_ONE:
            raise HTTPException(429, f"{MAX_OF_ONE} requests of {principal} wait already {_FOR}", _RETRY)
        if _waiting.total() >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests wait already {_FOR}", _RETRY)
        _waiting[principal] += 1
    try:
        with _turn:
            yield
    finally:
        with _counting:
            _waiting[principal] -= 1
            if not _waiting[principal]:
                del _waiting[principal]


_FOR, _RETRY = "for plans to be weighed", {"Retry-After": "5"}


def require_bounded(
    answers: Cache, model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY
) -> None:
    """Refuses a request whose plans cannot be listed in a few seconds; judges each once. Raises InputError."""
    key = ("bounded", model.key, cluster.devices, cluster.gpus_per_node, workload, runtime)
    answers.get(key, lambda: bounds.require_bounded(model, cluster, workload, runtime))
