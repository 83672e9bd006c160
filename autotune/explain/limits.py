"""Limits: what keeps the best plan from being faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from autotune.cost.estimate import EstimateTable
from autotune.cost.table import PlanTable
from autotune.explain.losses import PART_WORDS, Source, traced
from autotune.specs import Estimate, StepReading

COMMUNICATION = ("tp", "ep", "cp", "pp_p2p", "dp_exposed")
MIN_SHARE = 0.03
"""What takes less of the step than this limits nothing."""


class LimitKind(StrEnum):
    """Kinds of limits."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    IDLE = "idle"
    BUBBLE = "bubble"
    LAUNCH = "launch"
    OPTIMIZER = "optimizer"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit: the share of the step that it takes; of memory, the share that its lack costs."""

    kind: LimitKind
    share: float
    source: Source
    text: str

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {"kind": self.kind.value, "share": self.share, "source": self.source.value, "text": self.text}


def estimated_limits(found: Estimate) -> list[Limit]:
    """The parts of an estimated step, largest first; at least the largest."""
    seconds = found.seconds
    exposed = {name: getattr(seconds, name) for name in COMMUNICATION}
    largest = PART_WORDS[max(exposed, key=lambda name: exposed[name])]
    kinds = {
        LimitKind.COMPUTE: (seconds.compute, ""),
        LimitKind.COMMUNICATION: (sum(exposed.values()), f", most of it {largest}"),
        LimitKind.BUBBLE: (seconds.bubble, ", while the pipeline fills and drains"),
        LimitKind.LAUNCH: (seconds.launch, ", waiting for kernels to be launched"),
        LimitKind.OPTIMIZER: (seconds.optimizer, ""),
    }
    return _worth([
        _limit(kind, part / found.step_time_s, Source.ESTIMATE, more) for kind, (part, more) in kinds.items()
    ])  # fmt: skip


def measured_limits(readings: Sequence[StepReading], estimate: Estimate | None) -> list[Limit]:
    """The parts of a measured step, largest first; what a trace cannot tell apart is divided by the estimate.

    Empty where nothing was traced.
    """
    found = traced(readings)
    if found is None:
        return []
    compute, exposed, idle = (part / found.whole_s for part in (found.calc_s, found.exposed_s, found.idle_s))
    within = ""
    if estimate is not None:
        bubble, launch = (value / estimate.step_time_s for value in (estimate.seconds.bubble, estimate.seconds.launch))
        if bubble + launch >= MIN_SHARE:
            within = f"; of the estimated step {bubble:.0%} pipeline bubble, {launch:.0%} kernel launches"
    mu = f" that nothing computes under; mu = T_comm / T_calc is {found.mu:.2f}"
    return _worth([
        _limit(LimitKind.COMPUTE, compute, Source.MEASURED, ""),
        _limit(LimitKind.COMMUNICATION, exposed, Source.MEASURED, mu),
        _limit(LimitKind.IDLE, idle, Source.MEASURED, within),
    ])  # fmt: skip


def memory_limit(table: PlanTable, estimates: EstimateTable) -> Limit | None:
    """What the best plan would gain if everything fitted; None where that is next to nothing."""
    if estimates.best_row is None:
        return None
    fastest = int(np.argmin(estimates.step_time_s))
    gain = float(estimates.step_time_s[estimates.best_row] / estimates.step_time_s[fastest]) - 1.0
    if gain < MIN_SHARE:
        return None
    text = f"memory: with enough of it {table.plan(fastest).key} would be {gain:.0%} faster than what fits (estimate)"
    return Limit(kind=LimitKind.MEMORY, share=gain, source=Source.ESTIMATE, text=text)


def _limit(kind: LimitKind, share: float, source: Source, more: str) -> Limit:
    return Limit(
        kind=kind, share=share, source=source, text=f"{kind.value}: {share:.0%} of the step ({source.value}){more}"
    )


def _worth(found: Sequence[Limit]) -> list[Limit]:
    ordered = sorted(found, key=lambda item: -item.share)
    return ordered[:1] + [item for item in ordered[1:] if item.share >= MIN_SHARE]
