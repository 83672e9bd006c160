"""History: from ended checks to baselines and noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from autotune.specs.regression import Check, CheckRole, CheckWindow, VerdictKind
from autotune.tuning.regression.windows import Noise, Window, noise_of

MOST_VISITS = 10
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
    visits = found[key][:MOST_VISITS]
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
