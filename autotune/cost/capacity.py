"""Capacity: how much of a device's memory can be used, and how probable it is that a plan fits.

One figure, in the unit of what a plan needs: its tensors, and what a rank loses beside its allocator. A plan that needs
so much fits as often as not; how quickly it becomes certain on either side is how well the framework's memory is known.
What an allocator reserves beyond tensors counts in the peak and not in the need: it is given back before allocations
fail.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from autotune.cost.framework import Framework
from autotune.cost.table import FloatColumn
from autotune.specs import ClusterSpec, DeviceKind, Profile

DEVICE_OVERHEAD_BYTES = 2.0e9
"""Assumption: what a GPU rank loses to the context, the collective library's channels and library workspaces."""

USABLE = 0.91
"""Share of the memory beside the context that plans can need and still fit as often as not: by maximal likelihood over
767 plans of the nanotron sweep, 135 of which ran out of memory (docs/calibration.md)."""

GIVEN_BACK = 0.5
"""Share of inputs that are kept gathered although nobody needs them that is freed before allocations fail; the same
fit. (All of fragmentation is.)"""

MAY_FIT = 0.5
"""A plan is said to fit from this probability on."""


def context_bytes(cluster: ClusterSpec) -> float:
    """Bytes of a rank that no allocator sees: the context, the collective library's channels, workspaces (assumed)."""
    return 0.0 if cluster.device.kind is DeviceKind.CPU else DEVICE_OVERHEAD_BYTES


def device_overhead_bytes(cluster: ClusterSpec, profile: Profile | None) -> float:
    """Bytes of a rank beside its tensors: the context, and what a profile adds."""
    return context_bytes(cluster) + (profile.memory_overhead_bytes if profile else 0.0)


def usable_bytes(memory_bytes: float, overhead_bytes: float) -> float:
    """What a plan can need and fit as often as not; without a context (a CPU rank) all of the memory."""
    return overhead_bytes + (memory_bytes - overhead_bytes) * (USABLE if overhead_bytes else 1.0)


def device_bytes(needed_bytes: FloatColumn, overhead_bytes: float) -> FloatColumn:
    """Memory that a device must have for such a need: the inverse of `usable_bytes`."""
    return overhead_bytes + (needed_bytes - overhead_bytes) / (USABLE if overhead_bytes else 1.0)


def memory_sd(framework: Framework, profile: Profile | None = None) -> float:
    """Standard deviation of ln(true / estimated) of what is needed; trials behind a profile make it narrower."""
    calibrated = profile is not None and profile.memory_scale != 1.0
    return min(framework.memory_sd, CALIBRATED_SD) if calibrated else framework.memory_sd


CALIBRATED_SD = 0.08
"""Of a profile that has read the peaks of trials: what plans are off by on their own."""


def p_fits(allocated_bytes: FloatColumn, capacity_bytes: float, sd: FloatColumn | float) -> FloatColumn:
    """The probability that so much, give or take `sd` in its logarithm, is within the capacity of the allocator."""
    below = np.log(capacity_bytes) - np.log(np.maximum(allocated_bytes, 1.0))
    return np.asarray(ndtr(below / sd), dtype=np.float64)
