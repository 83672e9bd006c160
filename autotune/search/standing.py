"""Standings: measured plans, fastest first, with repeats of a plan pooled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from autotune.search.belief import Observation
from autotune.specs import ClusterSpec, DeviceKind, Plan, StepReading, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured plan: its mean over repeats and the interval around it (95 %).

    Args:
        plan: what was measured.
        tokens_per_s_per_gpu: mean of `speeds`.
        interval: around the mean; of one run that of its steps, of several Student's over runs.
        speeds: tokens/s/GPU of each run, in order.
        last: how many measurements of any plan came before its newest one.
        peak_bytes: the highest of all runs.
    """

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    speeds: tuple[float, ...]
    last: int = 0
    peak_bytes: float

    @property
    def repeats(self) -> int:
        """Runs that were measured."""
        return len(self.speeds)


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
    """All fully measured plans (not failed, pruned or carried over from cheaper trials), fastest first."""
    found: dict[Plan, list[Observation]] = {}
    last: dict[Plan, int] = {}
    for number, item in enumerate(observations):
        if item.whole:
            found.setdefault(item.plan, []).append(item)
            last[item.plan] = number
    pooled = (_standing(plan, items, last[plan]) for plan, items in found.items())
    return sorted(pooled, key=lambda standing: -standing.tokens_per_s_per_gpu)


def standings_of(trials: Iterable[Trial], cluster: ClusterSpec) -> list[Standing]:
    """The standings of stored trials."""
    return standings(observation(item.plan, item.reading, cluster) for item in trials if item.reading is not None)


def _standing(plan: Plan, items: Sequence[Observation], last: int) -> Standing:
    """Mean of repeats. The interval is the wider of the repeats' own and of Student's over the spread between them.

    Both are of ln(throughput): the interval is a factor each way, and never reaches below zero.
    """
    speeds = np.array([item.tokens_per_s_per_gpu for item in items], dtype=np.float64)
    mean, count = float(np.mean(speeds)), len(speeds)
    own = np.array([item.relative_noise for item in items], dtype=np.float64)
    half = float(np.sqrt(np.mean(own**2)))
    if count > 1:
        half = max(half, float(stdtrit(count - 1, 0.975)) * float(np.std(np.log(speeds), ddof=1)))
    factor = float(np.exp(half / np.sqrt(count)))
    return Standing(
        plan=plan,
        tokens_per_s_per_gpu=mean,
        interval=(mean / factor, mean * factor),
        speeds=tuple(float(value) for value in speeds),
        last=last,
        peak_bytes=max((item.peak_bytes or 0.0 for item in items), default=0.0),
    )
