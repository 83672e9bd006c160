"""Prometheus metrics: what the database counts at the moment of a scrape, and the latency of requests; and whether the
database and the broker answer at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from autotune.errors import StoreError
from autotune.ports.fleet import FleetCounts, FleetStore
from autotune.specs import JobState, NodeState, TuningState

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ENDLESS = "/tunings/{tuning_id}/events"
"""A stream lasts as long as its tuning: its duration is no latency."""


class Metrics:
    """One registry for one app: several apps of a process do not mix, and prometheus_client's own stays unused."""

    def __init__(self, store: FleetStore) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_FleetCollector(store))
        labels = ("method", "route", "status")
        self._requests = Counter("autotune_requests", "Requests that were answered.", labels, registry=self._registry)
        self._latency = Histogram(
            "autotune_request_seconds",
            "Seconds from request to the end of its answer.",
            labels[:2],
            buckets=LATENCY_S,
            registry=self._registry,
        )
        self._connections = Gauge("autotune_connections", "Connections that are open.", registry=self._registry)
        self._closed = Counter(
            "autotune_connections_closed", "Connections that the API closed.", ["reason"], registry=self._registry
        )

    def request(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts a request under its route's pattern: users can invent any number of paths and methods."""
        found = scope.get("route")
        route = getattr(found, "path", "none")
        method = scope["method"] if scope["method"] in (getattr(found, "methods", None) or ()) else "any"
        self._requests.labels(method, route, str(status or 499)).inc()
        if route != ENDLESS:
            self._latency.labels(method, route).observe(seconds)

    def connections(self, count: int) -> None:
        """Notes how many connections are open."""
        self._connections.set(count)

    def closed(self, reason: str) -> None:
        """Counts a connection that the API closed."""
        self._closed.labels(reason).inc()

    def text(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _FleetCollector:
    """Asks the database when it is scraped; nothing is kept here that could be wrong after a restart."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        counts = self._store.counts()
        yield _by_state("autotune_tunings", "Tunings by state.", counts.tunings, [*TuningState])
        yield _by_state("autotune_jobs", "Jobs by state.", counts.jobs, [*JobState])
        yield _by_state("autotune_nodes", "Registered nodes by state.", counts.nodes, [*NodeState])
        yield GaugeMetricFamily("autotune_leases", "Nodes that a job holds.", value=counts.leases)
        yield _gpu_seconds(counts)


def _by_state(name: str, text: str, counts: dict[str, int], states: list[str]) -> GaugeMetricFamily:
    """Every state, also those that nothing is in: a series that vanishes cannot be watched."""
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state in states:
        family.add_metric([str(state)], counts.get(state, 0))
    return family


def _gpu_seconds(counts: FleetCounts) -> CounterMetricFamily:
    return CounterMetricFamily("autotune_gpu_seconds", "GPU-seconds spent by all tunings.", value=counts.gpu_s)


TRUST_S = 1.0
"""How old an answer may be: asking us more often does not ask the database or the broker more often."""


class Liveness:
    """Whether the database and the broker answer, as it was a second ago at most.

    One request asks, in a thread; those that come meanwhile wait for what it finds, without a thread each.

    Args:
        store: the database's.
        broker_answers: asks the broker whether it is there.
    """

    def __init__(self, store: FleetStore, broker_answers: Callable[[], bool]) -> None:
        self._store, self._broker_answers, self._busy = store, broker_answers, anyio.Lock()
        self._until, self._found = 0.0, False
        self._error: StoreError | None = None

    async def broker_is_there(self) -> bool:
        """Whether the broker answers. Raises StoreError where the database does not."""
        async with self._busy:
            if time.monotonic() >= self._until:
                await run_in_threadpool(self._ask)
                self._until = time.monotonic() + TRUST_S
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._found

    def _ask(self) -> None:
        try:
            self._store.now()
        except StoreError as error:
            self._error = error
        else:
            self._error, self._found = None, self._broker_answers()
