"""Bounds of what one request may make us compute: the table of plans of a request is listed before it is ranked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from starlette.exceptions import HTTPException

from autotune.api.cache import Cache
from autotune.errors import InputError
from autotune.search.space import Runtime, divisors, legal_plans
from autotune.specs import ClusterSpec, ModelSpec, Recompute, Schedule, Space, Workload

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


MOST_LAYERS = 500
"""Stages are laid out one by one: with a thousand layers for seconds, with ten thousand for minutes."""

MOST_LAYOUTS = 2_000_000
"""Layouts of the devices times micro-batches. A million devices with four million sequences a step give 28,000."""

MOST_PLANS = 40_000_000
"""A bound from above: of 13.7 million for deepseek-v3 on 2,048 devices 2.2 million are legal, ranked in 2 s."""

PLAIN = Space(
    recompute=(Recompute.NONE,),
    zero_stage=(0,),
    sequence_parallel=(False,),
    schedule=(Schedule.GPIPE, Schedule.ONE_F_ONE_B),
    ep=(1,),
)
CHOICES = 2 * 4 * 3  # sequence parallel, ZeRO stage, recompute


def require_bounded(
    answers: Cache, model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY
) -> None:
    """Refuses a request whose plans cannot be listed in a few seconds. Raises InputError."""
    key = ("bounded", model.key, cluster.devices, cluster.gpus_per_node, workload, runtime)
    answers.get(key, lambda: _check(model, cluster, workload, runtime))


def _check(model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime) -> None:
    if model.layers > MOST_LAYERS:
        raise InputError("model.layers", model.layers, f"at most {MOST_LAYERS} layers are planned for here")
    stages = [pp for pp in divisors(cluster.devices) if pp <= model.layers]
    layouts = sum(_pairs(cluster.devices // pp) for pp in stages) * len(divisors(workload.global_batch))
    if layouts > MOST_LAYOUTS:
        raise InputError("cluster.nodes", cluster.nodes, f"{layouts} layouts are more than {MOST_LAYOUTS}: {_FEWER}")
    plain = len(legal_plans(model, cluster, workload, PLAIN, runtime))
    chunks = model.layers if runtime is Runtime.TORCH else len(divisors(model.layers))
    experts = len(divisors(model.experts)) if model.experts else 1
    plans = plain * experts * (chunks + 2) * CHOICES
    if plans > MOST_PLANS:
        raise InputError("cluster.nodes", cluster.nodes, f"{plans} plans are more than {MOST_PLANS}: {_FEWER}")


_FEWER = "give numbers of nodes and of sequences with fewer divisors"


def _pairs(number: int) -> int:
    """The ways to write a number as tp * cp * dp."""
    return sum(len(divisors(number // tp)) for tp in divisors(number))
