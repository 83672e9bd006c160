"""Bounds of what requests may make us compute: how large a ranking, and how many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from starlette.exceptions import HTTPException

from autotune.api.cache import Cache
from autotune.search import bounds
from autotune.search.space import Runtime
from autotune.specs import ClusterSpec, ModelSpec, Workload

MOST_WAITING = 8
"""Half of the handlers' threads: the others answer what is quick, however many rankings are asked for."""

_turn, _places = Lock(), BoundedSemaphore(MOST_WAITING)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Held while all plans of a request are weighed: more at once would only make each slower.

    Raises:
        HTTPException: 503, so many wait already that quick requests would find no thread.
    """
    if not _places.acquire(blocking=False):
        raise HTTPException(503, f"{MOST_WAITING} requests wait already for plans to be weighed", {"Retry-After": "5"})
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
