"""Timing: ranks aligned before a clock starts, devices drained before it stops; and what repeated times tell.

The statistics are pure; only `align` and `synchronize` need torch, on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["align", "drift", "half_width", "is_steady", "median", "percentile", "synchronize"]

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom (any statistics table; scipy.stats.t.ppf).
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table its last entry, at most 4 % too wide."""
    return _T_975[min(freedom, len(_T_975)) - 1]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; 0 for a single value, which has no spread to tell of."""
    if len(values) < 2:
        return 0.0
    return t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def drift(values: Sequence[float]) -> tuple[float, float]:
    """The change over the series along its least-squares line, and half of that change's 95 % interval.

    Needs at least three values.
    """
    count = len(values)
    centre, mean = (count - 1) / 2, fmean(values)
    spread = sum((index - centre) ** 2 for index in range(count))
    slope = sum((index - centre) * value for index, value in enumerate(values)) / spread
    residual = sum((value - mean - slope * (index - centre)) ** 2 for index, value in enumerate(values))
    error = math.sqrt(residual / (count - 2) / spread)
    return slope * (count - 1), t_quantile(count - 2) * error * (count - 1)


def is_steady(values: Sequence[float], tolerance: float) -> bool:
    """Whether the series shows no trend: its drift is within `tolerance` of the mean, or not significant at 95 %.

    Fewer than three values show nothing and are not called steady.
    """
    if len(values) < 3:
        return False
    change, half = drift(values)
    return abs(change) <= max(half, tolerance * fmean(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given. On CPU there is nothing to wait for."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def align(device: torch.device) -> None:
    """All ranks of the world meet, their devices drained."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)
