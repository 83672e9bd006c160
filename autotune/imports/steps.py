"""From the steps of a log to one figure: warm-up dropped, the median, and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from autotune.imports.logs import Step

WARMUP_STEPS = 5
"""Steps after a start that are not timed: allocators, autotuners and clocks settle in them."""

LEAST_LINES = 3
"""A median of fewer says little."""

OUTSIDE = 0.025
"""Chance that is left on either side of the interval."""


def settled(steps: Sequence[Step]) -> list[Step]:
    """The steps without warm-up: after a start, the first line and the WARMUP_STEPS steps from there.

    The first line's time may be a mean over many steps, warm-up included, so it goes in any case. A number that does
    not grow is another start (a restarted job that appends to its log), with a warm-up of its own.
    """
    kept: list[Step] = []
    start = last = None
    for step in steps:
        if start is None or last is None or step.number <= last:
            start = step.number
        elif step.number >= start + WARMUP_STEPS:
            kept.append(step)
        last = step.number
    return kept


def median_interval(times_s: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of at least one time; low and high hold the true median in 95 % of samples.

    Order statistics (David and Nagaraja 2003, section 7.1): the k-th smallest and largest, for the largest k with
    P(Binomial(n, 1/2) < k) <= 2.5 %. Fewer than six times cannot say as much, and get their whole range.
    """
    times = sorted(times_s)
    count = len(times)
    middle = (times[(count - 1) // 2] + times[count // 2]) / 2.0
    below, k = 0.0, 0
    while k < count // 2:
        below += comb(count, k) / 2.0**count
        if below > OUTSIDE:
            break
        k += 1
    first = max(k - 1, 0)
    return middle, times[first], times[count - 1 - first]
