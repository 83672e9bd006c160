"""Explain: on which part of the step a plan loses, what limits the best one, and why a plan is refused.

Measured parts are compared with measured parts, estimated with estimated ones; each line says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

import numpy as np

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import PlanTable
from autotune.specs import Estimate, Plan, StepReading

PART_WORDS = {
    "compute": "computing",
    "tp": "TP communication",
    "ep": "EP communication",
    "cp": "CP communication",
    "pp_p2p": "pipeline messages",
    "bubble": "pipeline bubble",
    "dp_exposed": "exposed DP communication",
    "optimizer": "optimizer",
    "launch": "kernel launches",
}
"""The parts of an estimate in words."""

DIMENSIONS: tuple[tuple[str, ...], ...] = (
    ("tp",), ("pp",), ("cp",), ("ep",), ("micro_batch",), ("zero_stage",), ("recompute",), ("sequence_parallel",),
    ("schedule", "vpp"),
)  # fmt: skip
"""What can be changed in a plan, one at a time; dp follows from tp, pp and cp."""

WORTH_NAMING = 0.01
"""Parts of a step that differ by less than this share of it are noise to a reader."""


class Source(StrEnum):
    """Whether figures were measured or are estimates."""

    MEASURED = "measured"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step, and those of its parts by name."""

    seconds: float
    parts: Mapping[str, float]
    source: Source


def estimated_step(found: Estimate) -> StepParts:
    """The parts of an estimate."""
    parts = {word: getattr(found.seconds, name) for name, word in PART_WORDS.items()}
    return StepParts(found.step_time_s, parts, Source.ESTIMATE)


def measured_step(readings: Sequence[StepReading], seconds: float) -> StepParts:
    """Medians over repeats: computing, exposed communication, idle. No parts where nothing was traced.

    Idle is what is left of the traced step: pipeline bubble, gaps between kernels, waiting for other ranks.

    Args:
        readings: of one plan.
        seconds: of its step, by the mean of its repeats.
    """
    found = traced(readings)
    if found is None:
        return StepParts(seconds, {}, Source.MEASURED)
    parts = {"computing": found.calc_s, "exposed communication": found.exposed_s, "idle": found.idle_s}
    return StepParts(seconds, parts, Source.MEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Medians over the traced steps of a plan, in seconds, and mu = T_comm / T_calc."""

    whole_s: float
    calc_s: float
    exposed_s: float
    mu: float

    @property
    def idle_s(self) -> float:
        """Neither computing nor communicating."""
        return max(self.whole_s - self.calc_s - self.exposed_s, 0.0)


def traced(readings: Sequence[StepReading]) -> Traced | None:
    """What traces of these runs show; None where there is none."""
    rows = [
        (item.traced_step_s or item.step_time_s, item.t_calc_s, item.t_comm_exposed_s, item.mu or 0.0)
        for item in readings
        if item.t_calc_s is not None and item.t_comm_exposed_s is not None
    ]
    if not rows:
        return None
    whole_s, calc_s, exposed_s, mu = (float(value) for value in np.median(np.array(rows), axis=0))
    return Traced(whole_s=whole_s, calc_s=calc_s, exposed_s=exposed_s, mu=mu)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """A part that differs: its seconds, and those in our plan."""

    part: str
    seconds: float
    instead_of_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What another plan loses against ours.

    Args:
        plan: the other one.
        best: ours.
        change: how it differs, in words.
        slower: its extra time as a share of our step; negative where it is faster.
        parts: what takes longer there, or less long where it is faster on the whole; the largest difference first.
        source: of all figures.
        refusal: why it cannot be used at all (memory), else empty.
    """

    plan: Plan
    best: Plan
    change: str
    slower: float
    parts: Sequence[PartLoss]
    source: Source
    refusal: str = ""

    @property
    def text(self) -> str:
        """One line."""
        if self.refusal:
            return f"{self.change}: {self.refusal}"
        parts = ", ".join(f"{item.part} {_ms(item.seconds)} instead of {_ms(item.instead_of_s)}" for item in self.parts)
        ending = f": {parts}" if parts else ""
        return f"{self.change}: {self.slower:+.1%} of the step ({self.source.value}){ending}"

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        parts = [{"part": item.part, "seconds": item.seconds, "instead_of_s": item.instead_of_s} for item in self.parts]
        return {
            "plan": self.plan.to_data(),
            "best": self.best.to_data(),
            "change": self.change,
            "slower": self.slower,
            "parts": parts,
            "source": self.source.value,
            "refusal": self.refusal or None,
            "text": self.text,
        }


def loss(own_plan: Plan, own: StepParts, plan: Plan, other: StepParts, refusal: str = "") -> Loss:
    """Compares two steps of the same source, by the parts that both have."""
    assert own.source is other.source, "measured figures are compared with measured ones only"
    sign = 1.0 if other.seconds >= own.seconds else -1.0
    telling = [
        PartLoss(part=name, seconds=seconds, instead_of_s=own.parts[name])
        for name, seconds in other.parts.items()
        if name in own.parts and sign * (seconds - own.parts[name]) > WORTH_NAMING * own.seconds
    ]
    return Loss(
        plan=plan,
        best=own_plan,
        change=change(own_plan, plan),
        slower=other.seconds / own.seconds - 1.0,
        parts=sorted(telling, key=lambda item: -abs(item.seconds - item.instead_of_s))[:3],
        source=own.source,
        refusal=refusal,
    )


def changed(own: Plan, other: Plan) -> list[tuple[str, ...]]:
    """The dimensions in which two plans differ."""
    return [names for names in DIMENSIONS if any(getattr(own, name) != getattr(other, name) for name in names)]


def change(own: Plan, other: Plan) -> str:
    """How the other plan differs: "tp 8 instead of 4, recompute full instead of none"."""
    names = [name for names in changed(own, other) for name in names if getattr(own, name) != getattr(other, name)]
    if "schedule" in names and "vpp" in names:  # one says it all
        names.remove("schedule" if min(own.vpp, other.vpp) > 1 else "vpp")
    words = [f"{name} {_word(getattr(other, name))} instead of {_word(getattr(own, name))}" for name in names]
    return ", ".join(words) or "the same plan"


def neighbours(own: Plan, table: PlanTable, estimates: EstimateTable) -> list[int]:
    """For each dimension in which the table has a choice, the row that changes it and as little else as possible.

    Of several, the fastest by estimate among those that fit; if none does, the one that misses by least.
    """
    wanted = PlanTable.of([own])
    differs = [
        np.any([getattr(table, name) != getattr(wanted, name)[0] for name in names], axis=0) for names in DIMENSIONS
    ]
    distance = np.sum(differs, axis=0)
    found = []
    for mask in differs:
        rows = np.flatnonzero(mask)
        if len(rows):
            rows = rows[distance[rows] == distance[rows].min()]
            fitting = rows[estimates.fits[rows]]
            weight, among = (estimates.step_time_s, fitting) if len(fitting) else (estimates.needed_bytes, rows)
            found.append(int(among[np.argmin(weight[among])]))
    return list(dict.fromkeys(found))


def misfit(estimates: EstimateTable, row: int) -> str:
    """Why a row does not fit: by how much, on which stage, and its largest parts; empty where it fits."""
    if estimates.fits[row]:
        return ""
    found = estimates.row(row)
    needs, has = float(estimates.needed_bytes[row]), float(estimates.usable_bytes)
    parts = sorted(found.bytes.to_data().items(), key=lambda item: -item[1])[:2]
    largest = ", ".join(f"{name} {_gib(size)}" for name, size in parts)
    room = f"{_gib(has)} of {_gib(estimates.device_memory_bytes)} can be used"
    return (
        f"does not fit: pipeline stage {found.worst_stage} needs {_gib(needs)} and {room}, "
        f"{_gib(needs - has)} too much; largest: {largest} (estimate)"
    )


def risk(estimates: EstimateTable, own: int, row: int) -> str:
    """Why a row that would be faster is not preferred: it is less likely to fit; empty where it is not faster."""
    if estimates.step_time_s[row] >= estimates.step_time_s[own]:
        return ""
    theirs, ours = estimates.p_fits[row], estimates.p_fits[own]
    return f"faster if it fits, which it does with a probability of {theirs:.0%}, this plan of {ours:.0%} (estimate)"


def losses(own: Plan, table: PlanTable, estimates: EstimateTable) -> list[Loss]:
    """What each neighbour loses, by estimate; least first. `own` is a plan of the table.

    Of two that change the same things and one of them more (tp, and tp with sequence parallelism), the faster.
    """
    row = table.find(own)
    assert row is not None, "the plan is one of the table"
    step = estimated_step(estimates.row(row))
    found = [
        loss(
            own, step, table.plan(i), estimated_step(estimates.row(i)), misfit(estimates, i) or risk(estimates, row, i)
        )
        for i in neighbours(own, table, estimates)
    ]
    kept: list[Loss] = []
    for item in sorted(found, key=lambda item: (bool(item.refusal), item.slower)):
        names = set(changed(own, item.plan))
        if not any(names <= set(changed(own, other.plan)) or names >= set(changed(own, other.plan)) for other in kept):
            kept.append(item)
    return kept


def largest_parts(found: Estimate) -> list[tuple[str, float]]:
    """The parts of an estimated step in words with their shares of it, largest first, without empty ones."""
    shares = {name: seconds / found.step_time_s for name, seconds in estimated_step(found).parts.items()}
    return sorted(((name, share) for name, share in shares.items() if share > 0.0), key=lambda item: -item[1])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, Enum) else value)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
