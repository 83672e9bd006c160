"""The app: `create_app` puts it together. Nothing happens at import."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from anyio.to_thread import current_default_thread_limiter
from cachetools import LRUCache, TTLCache
from fastapi import FastAPI
from fastapi.routing import APIRoute

from autotune.api import catalog, fleet, operation, plans, tunings
from autotune.api.access import Gate
from autotune.api.metrics import Liveness, Metrics
from autotune.api.openapi import document
from autotune.api.parts import Parts, Placed, Streams
from autotune.api.problems import add_handlers
from autotune.api.server import Edge
from autotune.api.sharing import Cache, Combiner, Shared, size_bytes
from autotune.errors import StoreConflictError

if TYPE_CHECKING:
    from autotune.fleet.service import FleetService
    from autotune.ports.fleet import FleetStore, Submission

DEFAULT_RATE = "6000/minute"
"""Requests of one principal: far more than people and scripts need, and few enough that no client takes up the API."""

ANSWERS_BYTES = 64 * 2**20
MOMENT_BYTES = 16 * 2**20
"""Of answers that are taken for true for a moment."""

TRUST_S = 1.0
"""How old a best plan, or what the names in a request stand for, may be; twice that while it is looked up again."""

ESTIMATE_TRUST_S = 10.0
"""How old an estimate carried over from elsewhere may be; twice that while it is weighed again."""

THREADS = 40
"""Handlers at a time: more than the database's connections, because some wait for what others look up."""


@asynccontextmanager
async def _few_threads(_app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield


def create_app(
    store: FleetStore,
    service: FleetService,
    *,
    broker_answers: Callable[[], bool],
    open_locally: bool = False,
    rate: str = DEFAULT_RATE,
) -> FastAPI:
    """The API over a store and a service.

    Args:
        store: keeps everything; shared by the threads that run the handlers.
        service: takes requests for tunings.
        broker_answers: asks the broker whether it is there; for /healthz.
        open_locally: it is bound to loopback, and takes requests from this machine without a key (see api.access).
        rate: requests of one principal, as "6000/minute".

    Raises:
        InputError: a rate that cannot be read.
    """
    app = FastAPI(
        title="autotune",
        version=version("autotune"),
        openapi_url=None,  # a route of ours serves it, through the same gate as all others
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_few_threads,
    )
    for each in (tunings, plans, catalog, fleet):
        app.router.routes.extend(each.router.routes)
    app.router.routes.extend([*operation.keys.routes, *operation.router.routes])
    for route in app.router.routes:
        assert isinstance(route, APIRoute)
        route.operation_id = route.unique_id = route.name

    def store_all(submissions: Sequence[Submission]) -> Sequence[Placed | StoreConflictError]:
        answers = store.submit_tunings(submissions)
        taken = [answer[0].id for answer in answers if not isinstance(answer, StoreConflictError)]
        places = store.queue_places(taken)
        return [
            answer if isinstance(answer, StoreConflictError) else (*answer, places.get(answer[0].id))
            for answer in answers
        ]

    def begin_all(tuning_ids: Sequence[str]) -> Sequence[bool]:
        return [service.begin()] * len(tuning_ids)

    metrics = Metrics(store)
    app.state.parts = Parts(
        store=store,
        service=service,
        gate=Gate(store, open_locally=open_locally, rate=rate),
        metrics=metrics,
        answers=Cache(LRUCache(ANSWERS_BYTES, size_bytes)),
        shared=Shared(MOMENT_BYTES, TRUST_S),
        estimates=Cache(TTLCache(MOMENT_BYTES, ESTIMATE_TRUST_S, getsizeof=size_bytes)),
        submissions=Combiner(store_all),
        beginnings=Combiner(begin_all),
        streams=Streams(),
        liveness=Liveness(store, broker_answers),
    )
    add_handlers(app)
    app.add_middleware(Edge, metrics=metrics)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app
