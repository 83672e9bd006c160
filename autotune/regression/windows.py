"""Windows: what was measured of a plan and its controls in one short stretch of time, and how noisy that is.

Speed drifts between windows by more than within one, and between the visits of a machine (two nights) by more than
between the windows of one. The noise of ln speed therefore has three parts: from repeat to repeat inside a window, from
window to window of one visit, and from visit to visit. All are learned from past windows of the same kind, robustly,
and start from a prior that counts as PRIOR_COUNT values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from autotune.specs.regression import Check, CheckRole, CheckWindow, VerdictKind

Floats = NDArray[np.float64]
PRIOR_WITHIN, PRIOR_BETWEEN, PRIOR_VISITS = 0.01, 0.006, 0.005
PRIOR_COUNT = 6.0
KNOWN = 14.0
"""Degrees of freedom that the prior of visits is worth where nothing speaks against it; fewer if they are noisy."""

MEDIAN_TO_MEAN = 1.2
"""Standard deviation of the median of five normal values, by that of their mean. What a neighbour does to two of five
repeats does not move the median at all."""

MAD_TO_SD = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Repeats of one quantity in one window: ln of a speed; at least one. `visit` tells windows of one visit."""

    visit: str
    logs: tuple[float, ...]

    @property
    def centre(self) -> float:
        """Its middle: the median."""
        return float(np.median(self.logs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations (of ln) within a window, between windows of a visit and between visits.

    `freedom` is how well the last of them, the worst known one, is known: degrees of freedom.
    """

    within: float
    between: float
    visits: float
    freedom: float

    def variance(self, windows: Sequence[Window]) -> float:
        """Of the mean of these windows' centres."""
        total = len(windows)
        sizes = [len(group) for group in _visits(windows)]
        shared = sum((size / total) ** 2 for size in sizes)
        own = (MEDIAN_TO_MEAN * self.within) ** 2 * float(np.mean([1.0 / len(window.logs) for window in windows]))
        return self.visits**2 * shared + (self.between**2 + own) / total


def level(windows: Sequence[Window]) -> float:
    """The mean of the windows' centres: ln of a speed."""
    return float(np.mean([window.centre for window in windows]))


def noise_of(series: Iterable[Sequence[Window]]) -> Noise:
    """The noise that series of windows show; in each series nothing is believed to have changed.

    Args:
        series: of one quantity each, in order of time; their levels may differ.
    """
    within: list[float] = []
    between: list[float] = []
    visits: list[float] = []
    repeats = [1.0]
    for windows in series:
        within += [_spread(window.logs) for window in windows if len(window.logs) >= 3]
        repeats += [float(len(window.logs)) for window in windows]
        groups = _visits(windows)
        for group in groups:
            between += _steps([window.centre for window in group])
        visits += _steps([level(group) for group in groups])
    inside = _pooled(within, PRIOR_WITHIN)
    # Steps from window to window hold the noise inside windows as well, those from visit to visit both.
    own = MEDIAN_TO_MEAN * inside / float(np.sqrt(np.median(repeats)))
    # Noisy repeats mean noisy windows, and those noisy nights, until enough of them have shown otherwise.
    prior_between = max(PRIOR_BETWEEN, inside / 2.0)
    beside = _pooled(between, float(np.hypot(prior_between, own)))
    windows_apart = _less(beside, own, prior_between)
    prior_visits = max(PRIOR_VISITS, windows_apart)
    outside = _pooled(visits, float(np.hypot(prior_visits, beside)))
    nights_apart = _less(outside, beside, prior_visits)
    trusted = KNOWN * min(1.0, PRIOR_VISITS / nights_apart) ** 2
    return Noise(within=inside, between=windows_apart, visits=nights_apart, freedom=3.0 + trusted + len(visits))


def _visits(windows: Sequence[Window]) -> list[list[Window]]:
    groups: dict[str, list[Window]] = {}
    for window in windows:
        groups.setdefault(window.visit, []).append(window)
    return list(groups.values())


def _steps(levels: Sequence[float]) -> list[float]:
    """Steps from one to the next, as standard deviations: a slow trend over weeks is no noise of a check."""
    return [abs(float(step)) / float(np.sqrt(2.0)) for step in np.diff(levels)]


def _less(total: float, part: float, prior: float) -> float:
    """What is left of a standard deviation without one of its parts; a quarter of the prior at least."""
    return float(np.sqrt(max(total**2 - part**2, (prior / 4.0) ** 2)))


def _spread(logs: Sequence[float]) -> float:
    """The standard deviation of a few values; of five or more without the pull of an outlier."""
    values = np.sort(np.asarray(logs, dtype=np.float64))
    if len(values) < 5:
        return float(np.std(values, ddof=1))
    # The standard deviation without the two ends, brought back to that of normal noise (for five values 1.88).
    return float(np.std(values[1:-1], ddof=1)) * 1.88


def _pooled(found: Sequence[float], prior: float) -> float:
    """The root of the mean of the prior's square, as PRIOR_COUNT values, and the found ones', outliers cut.

    A value counts at most as four times the median one: a single bad night does not hide the next loss.
    """
    if not found:
        return prior
    values = np.asarray(found, dtype=np.float64)
    limit = 4.0 * max(MAD_TO_SD * float(np.median(values)), prior / 4.0)
    squares = float(np.sum(np.minimum(values, limit) ** 2))
    return float(np.sqrt((PRIOR_COUNT * prior**2 + squares) / (PRIOR_COUNT + len(values))))


MAX_VISITS = 10
"""A baseline is its first visits: if it moved along, a loss of half a per cent a night would never be seen."""

STEADY = frozenset({VerdictKind.BASELINE, VerdictKind.BETTER, VerdictKind.UNCHANGED})
"""Verdicts of visits whose windows agree with each other: a better one begins a new level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The windows in which a plan was as fast as is expected of it, all in one environment.

    Args:
        visits: checks, oldest first, each with windows.
        environment_key: of all of them.
        fingerprint_key: of the newest.
    """

    visits: Sequence[Check]
    environment_key: str
    fingerprint_key: str

    @property
    def since(self) -> datetime:
        """When it began."""
        return self.visits[0].started_at

    @property
    def windows(self) -> list[CheckWindow]:
        """All windows."""
        return [window for check in self.visits if check.result for window in check.result.windows]

    def of(self, role: CheckRole) -> list[Window]:
        """The windows of one role."""
        return [window for check in self.visits for window in windows_of_role(check, role)]


def baseline_of(checks: Sequence[Check], environment_key: str) -> Baseline | None:
    """The baseline of one plan: of this environment, or of the newest other one; None where there is none.

    Args:
        checks: of the plan, oldest first; those without a result are passed over.
        environment_key: the present one.
    """
    found: dict[str, list[Check]] = {}
    for check in checks:
        kind = check.result.verdict if check.result is not None else None
        if kind in {VerdictKind.BASELINE, VerdictKind.BETTER}:
            found.pop(check.environment_key, None)
            found[check.environment_key] = [check]
        elif kind is VerdictKind.UNCHANGED:
            found.setdefault(check.environment_key, []).append(check)
    if not found:
        return None
    key = environment_key if environment_key in found else list(found)[-1]
    visits = found[key][:MAX_VISITS]
    return Baseline(visits=visits, environment_key=key, fingerprint_key=found[key][-1].fingerprint_key)


def windows_of_role(check: Check, role: CheckRole) -> list[Window]:
    """A check's windows of one role."""
    return [] if check.result is None else role_windows(check.id, check.result.windows, role)


def role_windows(visit: str, windows: Sequence[CheckWindow], role: CheckRole) -> list[Window]:
    """Windows of one role, as ln speed."""
    return [
        Window(visit=visit, logs=tuple(float(np.log(speed)) for speed in window.speeds[role]))
        for window in windows
        if window.speeds.get(role)
    ]


def noise_of_role(checks: Sequence[Check], role: CheckRole) -> Noise:
    """The noise of one role on one cluster: from all visits of its plans in which nothing changed.

    Args:
        checks: of any plans on the cluster, oldest first.
        role: what was measured.
    """
    series: list[list[Window]] = []
    current: dict[tuple[str, str], list[Window]] = {}
    for check in checks:
        if check.result is None or check.result.verdict not in STEADY:
            continue
        key = (check.series, check.environment_key)
        if key not in current or check.result.verdict is not VerdictKind.UNCHANGED:
            current[key] = []
            series.append(current[key])
        current[key] += windows_of_role(check, role)
    return noise_of(series)
