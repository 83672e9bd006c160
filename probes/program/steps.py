"""The steps that a program tells: collected, cleared of warm-up, and judged. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from autotune.specs import StepRequest
from probes.timing import half_width

MAX_STEPS_KEPT = 100_000
LEAST_S = 1e-6
MOST_S = 1e6
UNLIKELY = 3.0
"""A program whose steps come so many times as far apart as it says that they last tells them in another unit."""

IMPOSSIBLE = 1.2
"""Nor can its steps have lasted so many times as long as it has run."""

LONG_ENOUGH_S = 0.5
MIN_DROPPED = 1
SHARE_DROPPED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a program: the step's number, its seconds, when it came (time.monotonic), and what else it told.

    `time_s` is a mean where a line stands for several steps; None where only the arrival tells it.
    """

    number: int
    time_s: float | None
    arrived_s: float
    loss: float | None = None
    memory_bytes: float | None = None


class Steps:
    """A program's steps as they come.

    Args:
        started_s: when the program was started (time.monotonic).
    """

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self._found: dict[int, Step] = {}
        self._last: Step | None = None
        self.memory_bytes = 0.0

    def __len__(self) -> int:
        return len(self._found)

    def add(self, step: Step) -> None:
        """Takes one. Of a step that several ranks tell the slowest counts."""
        if step.memory_bytes is not None and math.isfinite(step.memory_bytes):
            self.memory_bytes = max(self.memory_bytes, step.memory_bytes)
        known = self._found.get(step.number)
        if step.time_s is None:
            step = self._by_arrival(step)
        if known is not None:
            if known.time_s is not None and step.time_s is not None and step.time_s > known.time_s:
                self._found[step.number] = Step(
                    number=step.number,
                    time_s=step.time_s,
                    arrived_s=known.arrived_s,
                    loss=known.loss,
                )
            return
        self._last = step
        if step.time_s is not None and len(self._found) < MAX_STEPS_KEPT:
            self._found[step.number] = step

    def _by_arrival(self, step: Step) -> Step:
        last = self._last
        if last is None or step.number <= last.number:
            return step
        time_s = (step.arrived_s - last.arrived_s) / (step.number - last.number)
        return Step(number=step.number, time_s=time_s, arrived_s=step.arrived_s, loss=step.loss)

    @property
    def times_s(self) -> list[float]:
        """Seconds of each, in order."""
        return [step.time_s for step in self._found.values() if step.time_s is not None]

    @property
    def losses(self) -> list[float]:
        """The losses that were told and are numbers."""
        return [step.loss for step in self._found.values() if step.loss is not None and math.isfinite(step.loss)]

    @property
    def first_s(self) -> float | None:
        """Seconds from the start to the end of the first step."""
        return next((step.arrived_s - self.started_s for step in self._found.values()), None)

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last one's arrival: long enough, they show whether the figures may be right."""
        found = list(self._found.values())
        return found[-1].arrived_s - found[0].arrived_s if found else 0.0

    def contradiction(self) -> str:
        """What is wrong with the figures by our own clock, in words; empty if they may be right."""
        found = list(self._found.values())
        times_s = self.times_s
        if not times_s:
            return ""
        said_s = median(times_s)
        if not LEAST_S <= said_s <= MOST_S:
            return f"a step is said to take {said_s:.3g} s"
        first, last = found[0], found[-1]
        ran_s = last.arrived_s - self.started_s
        counted = last.number - first.number + 1
        if said_s * counted > IMPOSSIBLE * ran_s + LONG_ENOUGH_S:
            return f"{counted} steps are said to take {said_s:.3g} s each, and came within {ran_s:.3g} s of the start"
        apart_s = [
            (after.arrived_s - before.arrived_s) / (after.number - before.number)
            for before, after in pairwise(found)
            if after.number > before.number
        ]
        if len(apart_s) >= 3 and self.span_s >= LONG_ENOUGH_S and median(apart_s) > UNLIKELY * said_s:
            return f"a step is said to take {said_s:.3g} s, and steps come {median(apart_s):.3g} s apart"
        return ""


def warmup(times_s: Sequence[float]) -> int:
    """How many of the first steps are warm-up: the truncation with the smallest standard error of what is left.

    That is MSER (White 1997, Simulation 69:323): sum of squares over the square of the count. The first step always
    goes, and half of them at most.
    """
    most = max(MIN_DROPPED, int(SHARE_DROPPED * len(times_s)))

    def error(dropped: int) -> float:
        rest = times_s[dropped:]
        mean = fmean(rest)
        return sum((time_s - mean) ** 2 for time_s in rest) / len(rest) ** 2

    return min(range(MIN_DROPPED, most + 1), key=error) if len(times_s) > MIN_DROPPED else len(times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the steps so far amount to: warm-up, timed ones, and whether no more are needed."""

    warmup_times_s: list[float]
    step_times_s: list[float]
    enough: bool
    pruned: bool


def judge(times_s: Sequence[float], request: StepRequest) -> Verdict:
    """Whether the timed steps suffice: narrow enough an interval, as many as are wanted at most, or too slow to win."""
    dropped = warmup(times_s)
    timed = list(times_s[dropped:])
    limit_s = request.give_up_step_s
    pruned = limit_s is not None and len(timed) >= 3 and min(timed) > limit_s
    enough = pruned or len(timed) >= request.max_steps
    if len(timed) >= max(2, request.min_steps):
        enough = enough or half_width(timed) <= request.target_relative_interval * fmean(timed)
    return Verdict(warmup_times_s=list(times_s[:dropped]), step_times_s=timed, enough=enough, pruned=pruned)
