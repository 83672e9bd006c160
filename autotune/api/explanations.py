"""The shapes of an explanation, for the OpenAPI document: limits, losses and what-ifs (autotune.search.explanation)."""

from __future__ import annotations

from typing import Literal

from autotune.search.explain import Source
from autotune.search.limits import LimitKind
from autotune.specs import Plan, Spec


class ExplainedLimit(Spec):
    """What bounds the best plan, and the share of its step (or of its memory) that it takes."""

    kind: LimitKind
    share: float
    source: Source
    text: str


class ExplainedPart(Spec):
    """A part of a step, in another plan and in the best one."""

    part: str
    seconds: float
    instead_of_s: float


class ExplainedLoss(Spec):
    """What another plan loses against the best one, and in which parts of the step; `slower` is a share of the step."""

    plan: Plan
    best: Plan
    change: str
    slower: float
    parts: list[ExplainedPart]
    source: Source
    refusal: str | None
    text: str


class ExplainedChange(Spec):
    """What other hardware, or another workload, would gain, and the plan that would be the best then."""

    change: str
    gain: float
    plan: Plan
    source: Literal["estimate"]
    text: str


class Explanation(Spec):
    """Limits, largest first; losses, measured ones first; what-ifs, most helpful first. Each says what it rests on."""

    limits: list[ExplainedLimit]
    losses: list[ExplainedLoss]
    what_ifs: list[ExplainedChange]
