"""What happens during a tuning, as records for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.search.acquisition import StopVerdict
from autotune.specs import Plan, ProbeOutcome, ProbeProgress, ProbeRequest, Trial, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The tuning entered a state, or its message changed."""

    tuning: Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStarted:
    """A collective or layer probe begins; `remaining` counts it too."""

    request: ProbeRequest
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnded:
    """A collective or layer probe ended."""

    request: ProbeRequest
    outcome: ProbeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A step probe begins."""

    trial: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A step probe ended, well or not, and what the search thinks now."""

    trial: Trial
    verdict: StopVerdict
    gpu_s_spent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A line of progress from the running probe."""

    progress: ProbeProgress
    plan: Plan | None


Event = StateChanged | ProbeStarted | ProbeEnded | TrialStarted | TrialEnded | Progressed
OnEvent = Callable[[Event], None]
