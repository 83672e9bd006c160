"""Timing: ranks aligned before a clock starts, devices drained before it stops; and what repeated times tell.

The statistics are pure; only `align` and `synchronize` need torch, on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from scipy.special import stdtrit

if TYPE_CHECKING:
    import torch


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; 0 for a single value, which has no spread to tell of."""
    if len(values) < 2:
        return 0.0
    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))


def drift(values: Sequence[float]) -> tuple[float, float]:
    """The change over the series along its least-squares line, and half of that change's 95 % interval.

    Needs at least three values.
    """
    if min(values) == max(values):
        return 0.0, 0.0  # scipy calls the error of such a line not a number
    from scipy.stats import linregress  # half a second to import, which only the launcher needs

    line, last = linregress(range(len(values)), values), len(values) - 1
    return float(line.slope) * last, float(stdtrit(len(values) - 2, 0.975) * line.stderr) * last


def is_steady(values: Sequence[float], tolerance: float) -> bool:
    """Whether the series shows no trend: its drift is within `tolerance` of the mean, or not significant at 95 %.

    Fewer than three values show nothing and are not called steady.
    """
    if len(values) < 3:
        return False
    change, half = drift(values)
    return abs(change) <= max(half, tolerance * fmean(values))


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
