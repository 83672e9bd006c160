"""More bandwidth, FLOP/s or memory never makes the best plan slower, whatever is known of the links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.calibrate import fit_profile
from autotune.cost.estimate import estimate_table
from autotune.cost.network import ring_traffic
from autotune.search.space import legal_plans
from autotune.specs import ClusterSpec, CollectiveOp, CollectiveReading, FrameworkName, ModelSpec, Space, Workload

SPACE = Space(micro_batch=(1, 2, 8), zero_stage=(0, 1, 3))
QUESTIONS = {
    "llama3.1-8b": (FrameworkName.TORCH, cluster_from_shorthand("h100-80gb-sxm:2x8")),
    "llama2-13b": (FrameworkName.NANOTRON, cluster_from_shorthand("a100-80gb-sxm:2x8")),
    "qwen3-30b-a3b": (FrameworkName.MEGATRON, cluster_from_shorthand("h100-80gb-sxm:2x8")),
}
MIB = 2**20
SIZES: dict[str, tuple[int, ...]] = {"catalog": (), "one size": (256 * MIB,), "many sizes": (MIB, 16 * MIB, 256 * MIB)}


def reading(size: int, size_bytes: int, busbw: float, latency_s: float) -> CollectiveReading:
    traffic = ring_traffic(CollectiveOp.ALL_REDUCE, size)
    time_s = latency_s + traffic * size_bytes / busbw
    return CollectiveReading(
        op=CollectiveOp.ALL_REDUCE, group_size=size, stride=1, size_bytes=size_bytes, iterations=1, time_s=time_s,
        time_p10_s=time_s, time_p90_s=time_s, algbw_bytes_per_s=size_bytes / time_s,
        busbw_bytes_per_s=traffic * size_bytes / time_s,
    )  # fmt: skip


def readings(sizes: Sequence[int], faster: float) -> list[CollectiveReading]:
    """Of one node and of two; a slow network, so that latency and rate are hard to tell apart."""
    inside = [reading(8, size, 300e9 * faster, 80e-6 / faster) for size in sizes]
    return inside + [reading(16, size, 40e9 * faster, 600e-6 / faster) for size in sizes]


def link(name: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def faster(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        now = getattr(cluster, name)
        return cluster.model_copy(update={name: now.model_copy(update={"bytes_per_s": now.bytes_per_s * factor})})

    return faster


def device(**fields: Callable[[ClusterSpec, float], object]) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def better(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        update = {name: make(cluster, factor) for name, make in fields.items()}
        return cluster.model_copy(update={"device": cluster.device.model_copy(update=update)})

    return better


LEVERS = {
    "intra": link("intra"),
    "inter": link("inter"),
    "FLOP/s": device(
        peak_flops_per_s=lambda cluster, factor: {
            dtype: rate * factor for dtype, rate in cluster.device.peak_flops_per_s.items()
        }
    ),
    "memory": device(memory_bytes=lambda cluster, factor: int(cluster.device.memory_bytes * factor)),
    "memory bandwidth": device(
        memory_bytes_per_s=lambda cluster, factor: (cluster.device.memory_bytes_per_s or 0.0) * factor
    ),
    "readings": lambda cluster, factor: cluster,
}
FACTORS = (0.7, 1.0, 2.0, 5.0)


def best_speed(spec: ModelSpec, cluster: ClusterSpec, work: Workload, sizes: Sequence[int], faster: float) -> float:
    found = readings(sizes, faster)
    profile = fit_profile(cluster, "f", found, [], []) if found else None
    estimates = estimate_table(spec, cluster, work, legal_plans(spec, cluster, work, SPACE), profile)
    return float(np.where(estimates.fits, estimates.tokens_per_s_per_gpu, 0.0).max())


@pytest.mark.parametrize("known", SIZES)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_better_cluster_never_has_a_slower_best_plan(name: str, lever: str, known: str) -> None:
    framework, cluster = QUESTIONS[name]
    work = Workload(seq_len=4096, global_batch=256, framework=framework)
    speeds = [
        best_speed(
            model(name), LEVERS[lever](cluster, factor), work, SIZES[known], factor if lever == "readings" else 1.0
        )
        for factor in FACTORS
    ]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(speeds)), speeds
