"""Standings: measured plans, fastest first, with repeats of a plan pooled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.belief import Observation
from autotune.specs import ClusterSpec, DeviceKind, Plan, StepReading, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured plan: its mean over repeats and the interval around it (95 %)."""

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    repeats: int
    peak_bytes: float


def observation(plan: Plan, reading: StepReading, cluster: ClusterSpec, gpu_s: float | None = None) -> Observation:
    """What a reading teaches."""
    low, high = reading.interval_tokens_per_s_per_gpu
    mean = reading.tokens_per_s_per_gpu
    return Observation(
        plan=plan,
        tokens_per_s_per_gpu=mean,
        relative_noise=(high - low) / (2.0 * mean) if mean else 0.0,
        peak_bytes=float(peak_memory_bytes(reading, cluster)),
        pruned=reading.pruned,
        gpu_s=gpu_s,
    )


def peak_memory_bytes(reading: StepReading, cluster: ClusterSpec) -> int:
    """What counts against a device's memory: what a GPU's allocator reserved; on CPU the accounted tensors."""
    if cluster.device.kind is DeviceKind.CPU:
        return reading.peak_allocated_bytes
    return max(reading.peak_allocated_bytes, reading.peak_reserved_bytes)


def standings(observations: Iterable[Observation]) -> list[Standing]:
    """All fully measured plans (not failed, not pruned), fastest first."""
    found: dict[Plan, list[Observation]] = {}
    for item in observations:
        if item.tokens_per_s_per_gpu and not item.pruned:
            found.setdefault(item.plan, []).append(item)
    return sorted((_standing(plan, items) for plan, items in found.items()), key=lambda s: -s.tokens_per_s_per_gpu)


def standings_of(trials: Iterable[Trial], cluster: ClusterSpec) -> list[Standing]:
    """The standings of stored trials."""
    return standings(observation(item.plan, item.reading, cluster) for item in trials if item.reading is not None)


def _standing(plan: Plan, items: Sequence[Observation]) -> Standing:
    """Mean of repeats. The interval is the wider of the repeats' own and of the spread between them."""
    values = np.array([item.tokens_per_s_per_gpu for item in items], dtype=np.float64)
    mean = float(np.mean(values))
    own = np.array([item.relative_noise for item in items], dtype=np.float64) * values
    within = float(np.sqrt(np.mean(own**2)))
    between = 2.0 * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    half = max(within, between) / float(np.sqrt(len(values)))
    peak = max((item.peak_bytes or 0.0 for item in items), default=0.0)
    return Standing(
        plan=plan,
        tokens_per_s_per_gpu=mean,
        interval=(mean - half, mean + half),
        repeats=len(values),
        peak_bytes=peak,
    )
