"""Conclusion: from a check's measurements and its plan's history to a verdict, a cause and what follows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.knowledge.nearness import Change, changes
from autotune.regression.attribution import CauseEvidence, attribute, out_of_memory, peak_of
from autotune.regression.protocol import controls, given_up, order_of, windows_of
from autotune.regression.verdict import BASELINE_WINDOWS, MAX_WINDOWS, Verdict, judge
from autotune.regression.windows import Baseline, baseline_of, noise_of_role, role_windows
from autotune.specs import BestEntry, FailureKind, Fingerprint
from autotune.specs.regression import (
    Attribution,
    CauseKind,
    Check,
    CheckMeasurement,
    CheckResult,
    CheckRole,
    CheckWindow,
    VerdictKind,
)

NOT_RETUNED = frozenset({CauseKind.RANK, CauseKind.NODE, CauseKind.CANNOT_TELL})
"""Causes that another plan does not mend, or that nobody knows."""

CLOSE = 0.10
"""A runner-up that was within this of the winner may win in another environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What a check is judged against.

    Args:
        entry: what is checked.
        same_plan: ended checks of its plan, oldest first.
        same_cluster: ended checks of any plan on its cluster, oldest first: they teach the noise.
        now: the present environment.
        before: the environment of each fingerprint that a baseline may have.
    """

    entry: BestEntry
    same_plan: Sequence[Check]
    same_cluster: Sequence[Check]
    now: Fingerprint | None
    before: dict[str, Fingerprint]

    @property
    def baseline(self) -> Baseline | None:
        """What the plan is compared with."""
        return baseline_of(self.same_plan, self.now.environment_key if self.now else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A check's result as far as it goes; `again` asks for another window."""

    result: CheckResult
    again: bool


def conclude(check: Check, done: Sequence[CheckMeasurement], background: Background) -> Conclusion:
    """What the measurements so far say.

    Args:
        check: under way.
        done: its measurements, by number.
        background: what it is judged against.
    """
    windows = windows_of(done)
    failed = given_up(done)
    baseline = background.baseline
    if failed is not None:
        return Conclusion(result=_broken(failed, windows), again=False)
    good, spent_gpu_s = sum(item.speed is not None for item in done), sum(item.gpu_s for item in done)
    if not windows or good % len(order_of(background.entry)):
        return Conclusion(result=CheckResult(verdict=VerdictKind.CANNOT_TELL), again=True)
    if baseline is None:
        return _first(check, windows, spent_gpu_s)
    return _compared(check, windows, baseline, background, spent_gpu_s)


def _affordable(check: Check, windows: Sequence[CheckWindow], spent_gpu_s: float) -> bool:
    """Whether another window like those before fits in what was left for the check."""
    limit = check.budget_gpu_s
    return limit is None or spent_gpu_s * (1.0 + 1.0 / len(windows)) <= limit


def _first(check: Check, windows: Sequence[CheckWindow], spent_gpu_s: float) -> Conclusion:
    result = CheckResult(
        verdict=VerdictKind.BASELINE,
        windows=tuple(windows),
        tokens_per_s_per_gpu=_typical_speed(windows),
        peak_bytes=peak_of(windows),
        message=f"{len(windows)} windows to compare later checks with",
    )
    again = len(windows) < BASELINE_WINDOWS and _affordable(check, windows, spent_gpu_s)
    return Conclusion(result=result, again=again)


def _compared(
    check: Check, windows: Sequence[CheckWindow], baseline: Baseline, background: Background, spent_gpu_s: float
) -> Conclusion:
    noise = noise_of_role(background.same_cluster, CheckRole.WINNER)
    now = role_windows(check.id, windows, CheckRole.WINNER)
    verdict = judge(baseline.of(CheckRole.WINNER), now, noise)
    cause = None
    again = verdict.again
    if verdict.kind is VerdictKind.WORSE:
        cause = _cause(check, windows, baseline, background, verdict)
        again = cause.kind is CauseKind.CANNOT_TELL and len(windows) < MAX_WINDOWS
    elif verdict.kind is VerdictKind.BETTER or _is_new(baseline, background):
        again = again or len(windows) < BASELINE_WINDOWS  # later checks will be compared with these
    again = again and _affordable(check, windows, spent_gpu_s)
    result = CheckResult(
        verdict=verdict.kind,
        effect=verdict.effect,
        interval=verdict.interval,
        windows=tuple(windows),
        baseline_windows=len(baseline.windows),
        baseline_since=baseline.since,
        within=noise.within,
        between=noise.between,
        visits=noise.visits,
        tokens_per_s_per_gpu=_typical_speed(windows),
        peak_bytes=peak_of(windows),
        baseline_peak_bytes=peak_of(baseline.windows),
        cause=cause,
        message=_message(verdict),
        retune_reason=_retune_reason(background.entry, verdict, cause, _is_new(baseline, background)),
    )
    return Conclusion(result=result, again=again)


def _cause(
    check: Check, windows: Sequence[CheckWindow], baseline: Baseline, background: Background, verdict: Verdict
) -> Attribution:
    roles = list(controls(background.entry))
    evidence = CauseEvidence(
        entry=background.entry,
        loss=-float(np.log1p(verdict.effect)),
        baseline=baseline.windows,
        now=windows,
        roles={role: (baseline.of(role), role_windows(check.id, windows, role)) for role in roles},
        noises={role: noise_of_role(background.same_cluster, role) for role in roles},
        changed=_changed(baseline, background),
    )
    return attribute(evidence)


def _is_new(baseline: Baseline, background: Background) -> bool:
    return background.now is not None and baseline.environment_key != background.now.environment_key


def _changed(baseline: Baseline, background: Background) -> list[Change]:
    before = background.before.get(baseline.fingerprint_key)
    if before is None or background.now is None or not _is_new(baseline, background):
        return []
    return changes(before, background.now)


def _broken(failed: CheckMeasurement, windows: Sequence[CheckWindow]) -> CheckResult:
    """A check whose measurements fail: a plan that runs out of memory does not hold, all else may be anything."""
    text = f"{failed.role.value.replace('_', ' ')} probe failed ({failed.failure}): {failed.message}"
    if failed.failure is FailureKind.OOM and failed.role is CheckRole.WINNER:
        return CheckResult(
            verdict=VerdictKind.WORSE,
            effect=-1.0,
            interval=(-1.0, -1.0),
            windows=tuple(windows),
            cause=out_of_memory(failed.message),
            message="the plan does not run any more: out of memory",
            retune_reason="the plan does not fit any more",
        )
    return CheckResult(verdict=VerdictKind.CANNOT_TELL, windows=tuple(windows), message=text)


def _retune_reason(entry: BestEntry, verdict: Verdict, cause: Attribution | None, is_new: bool) -> str:
    """Why a challenger may now win; empty if none may."""
    if verdict.kind is VerdictKind.WORSE:
        if cause is None or cause.kind in NOT_RETUNED:
            return ""
        second = entry.runner_up
        now = entry.tokens_per_s_per_gpu * (1.0 + verdict.effect)
        if second is not None and second.interval[1] >= now:
            return f"runner-up {second.plan.key} was as fast as the plan is now"
        return f"the plan lost {-verdict.effect:.1%}"
    second = entry.runner_up
    if is_new and second is not None and second.interval[1] >= entry.tokens_per_s_per_gpu * (1.0 - CLOSE):
        return f"the environment changed, and runner-up {second.plan.key} was within {CLOSE:.0%}"
    return ""


def _typical_speed(windows: Sequence[CheckWindow]) -> float | None:
    speeds = [float(np.mean(window.speeds[CheckRole.WINNER])) for window in windows]
    return float(np.mean(speeds)) if speeds else None


def _message(verdict: Verdict) -> str:
    low, high = verdict.interval
    found = f"throughput {verdict.effect:+.1%} ({low:+.1%} to {high:+.1%})"
    if verdict.kind is VerdictKind.CANNOT_TELL:
        return f"{found}: too noisy to tell"
    return found
