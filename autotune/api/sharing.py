"""Sharing: what many requests ask for at the same time is worked out once; answers are kept as long as they are true;
and what requests may make us compute is bounded."""

from __future__ import annotations

import time
from asyncio import Future, Task, create_task, current_task, get_running_loop, shield
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException

from autotune.errors import InputError, MissingMeasurementError, NothingFitsError
from autotune.search import space as bounds
from autotune.search.space import Runtime
from autotune.specs import ClusterSpec, ModelSpec, Workload

# ----------------------------------------------------------------------------------------------------
# Combining: what requests ask for at the same time is done in one go, by one thread.

MOST = 64
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
                batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
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


# ----------------------------------------------------------------------------------------------------
# Answers that cost time and are asked for again: kept as long as they are true, or taken for true for a moment.

REFUSALS = (InputError, NothingFitsError, MissingMeasurementError)


class Recent:
    """What was found a moment ago, for handlers in threads: a hundred clients with one question ask it once."""

    def __init__(self, size: int, trust_s: float) -> None:
        self._size, self._trust_s, self._lock = size, trust_s, Lock()
        self._found: dict[Hashable, tuple[float, Any]] = {}
        self._busy: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` gave within the last `trust_s` seconds; up to twice as old while somebody asks again just now.

        What it raises is not kept.
        """
        until, found = self._found.get(key, (None, None))
        now = time.monotonic()
        if until is not None and now < until:
            return found
        with self._lock:
            busy = self._busy.setdefault(key, Lock())
        if not busy.acquire(blocking=until is None or now >= until + self._trust_s):
            return found
        try:
            return self._ask(key, find, until)
        finally:
            with self._lock:
                self._busy.pop(key, None)
            busy.release()

    def _ask(self, key: Hashable, find: Callable[[], Any], seen: float | None) -> Any:
        until, found = self._found.get(key, (None, None))
        if until is not None and until != seen:  # who held the lock before us has asked
            return found
        found = find()
        with self._lock:
            if len(self._found) >= self._size:
                self._found.clear()
            self._found[key] = (time.monotonic() + self._trust_s, found)
        return found


class Shared:
    """The same for handlers that wait in the event loop: however many ask, it is looked for once.

    Only the loop's thread calls `get`; any thread may call `forget`.
    """

    def __init__(self, size: int, trust_s: float) -> None:
        self._size, self._trust_s, self._lock = size, trust_s, Lock()
        self._found: dict[Hashable, tuple[float, Any]] = {}
        self._asking: dict[Hashable, Task[Any]] = {}

    async def get(self, key: Hashable, find: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `find` gave, if it was asked within the last `trust_s` seconds; up to twice as old while it is asked.

        What it raises is raised to all who wait for it. That and None are not kept.
        """
        until, found = self._found.get(key, (0.0, None))
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
        if len(self._found) >= self._size:
            self._found.clear()
        self._found[key] = (until, found)

    def forget(self) -> None:
        """Asks for everything again, also for what is being looked for: something was changed here."""
        with self._lock:
            self._asking.clear()
            self._found.clear()


class Cache:
    """The newest `size` answers, each computed by one thread at a time.

    The key holds everything that the answer depends on, so none is ever stale.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._found: OrderedDict[Hashable, Any] = OrderedDict()
        self._busy: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The answer under `key`, computed if it is not there. Refusals are answers too; other errors are not kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return told(self._found[key])
            busy = self._busy.setdefault(key, Lock())
        with busy:
            with self._lock:
                if key in self._found:
                    return told(self._found[key])
            try:
                answer = compute()
            except REFUSALS as error:
                answer = error
            finally:
                with self._lock:
                    self._busy.pop(key, None)
            self._keep(key, answer)
            return told(answer)

    def _keep(self, key: Hashable, answer: Any) -> None:
        with self._lock:
            self._found[key] = answer
            while len(self._found) > self._size:
                self._found.popitem(last=False)


def told(answer: Any) -> Any:
    """The answer. Raises it where it is a refusal."""
    if isinstance(answer, REFUSALS):
        raise answer.with_traceback(None)
    return answer


# ----------------------------------------------------------------------------------------------------
# Bounds of what requests may make us compute: how large a ranking, and how many at a time.

MAX_WAITING = 8
"""Half of the handlers' threads: the others answer what is quick, however many rankings are asked for."""

_turn, _places = Lock(), BoundedSemaphore(MAX_WAITING)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Held while all plans of a request are weighed: more at once would only make each slower.

    Raises:
        HTTPException: 503, so many wait already that quick requests would find no thread.
    """
    if not _places.acquire(blocking=False):
        raise HTTPException(503, f"{MAX_WAITING} requests wait already for plans to be weighed", {"Retry-After": "5"})
    try:
        with _turn:
            yield
    finally:
        _places.release()


def require_bounded(
    answers: Cache, model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY
) -> None:
    """Refuses a request whose plans cannot be listed in a few seconds; judges each once. Raises InputError."""
    key = ("bounded", model.key, cluster.devices, cluster.gpus_per_node, workload, runtime)
    answers.get(key, lambda: bounds.require_bounded(model, cluster, workload, runtime))
