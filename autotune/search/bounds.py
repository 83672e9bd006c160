"""Bounds of the space: beyond them listing every plan of a request takes minutes, whoever asks for it."""

from __future__ import annotations

from autotune.errors import InputError
from autotune.search.space import Runtime, divisors, legal_plans
from autotune.specs import ClusterSpec, ModelSpec, Recompute, Schedule, Space, Workload

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
_FEWER = "give numbers of nodes and of sequences with fewer divisors"


def require_bounded(model: ModelSpec, cluster: ClusterSpec, workload: Workload, runtime: Runtime = Runtime.ANY) -> None:
    """Refuses a request whose plans cannot be listed in a few seconds. Raises InputError."""
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


def _pairs(number: int) -> int:
    """The ways to write a number as tp * cp * dp."""
    return sum(len(divisors(number // tp)) for tp in divisors(number))
