"""Verdict: is a plan as fast as it was? Error rates by experiment are in docs/regression.md.

With d the difference of the mean window centre (ln throughput) now and at the baseline, and v its variance under the
noise model (autotune.regression.windows), the interval is d ± t sqrt(v). Windows are added until the question is
decided:

- unchanged: nothing speaks for a change, and a loss of DETECTABLE is ruled out;
- worse or better: at least two windows, the interval leaves out zero, and the change is at least MIN_EFFECT;
- cannot tell: MAX_WINDOWS windows were not enough at this noise.

Each look may err: half of the error of an alarm is shared among the looks at which one can be raised, half is the last
one's, which knows most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from autotune.regression.windows import Noise, Window, level
from autotune.specs.regression import VerdictKind

FALSE_ALARM = 0.003
"""Probability that a check of an unchanged plan ends in `better` or `worse`, all looks together."""

MISSED = 0.02
"""Probability that a look rules out a loss of DETECTABLE that is there."""

SUSPICION = 0.10
"""A look that finds 'no change' less probable than this asks for another window."""

MIN_EFFECT = 0.01
DETECTABLE = 0.05
"""The loss that a check is made to find."""

REPEATS, MAX_WINDOWS = 5, 12
"""Measurements of the plan in one window; windows of one check at most."""

BASELINE_WINDOWS = 4
"""Windows of the first check. One has no power: see the table in docs/regression.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict, the relative change of speed and its interval; `again` asks for another window."""

    kind: VerdictKind
    effect: float
    interval: tuple[float, float]
    again: bool = False


def judge(baseline: Sequence[Window], now: Sequence[Window], noise: Noise) -> Verdict:
    """Compares windows of a plan's ln throughput; `again` asks for another window of it.

    Args:
        baseline: windows in which it was as fast as is expected of it.
        now: this check's.
        noise: of such windows.
    """
    change = level(now) - level(baseline)
    spread = float(np.sqrt(noise.variance(baseline) + noise.variance(now)))
    half = quantile(1.0 - _error_of_look(len(now)) / 2.0, noise) * spread
    kind = VerdictKind.CANNOT_TELL
    if len(now) > 1 and abs(change) > half and abs(np.expm1(change)) >= MIN_EFFECT:
        kind = VerdictKind.WORSE if change < 0 else VerdictKind.BETTER
    elif _nothing_speaks_for_change(change, spread, noise) and _ruled_out(change, spread, noise):
        kind = VerdictKind.UNCHANGED
    return Verdict(
        kind=kind,
        effect=float(np.expm1(change)),
        interval=(float(np.expm1(change - half)), float(np.expm1(change + half))),
        again=kind is VerdictKind.CANNOT_TELL and len(now) < MAX_WINDOWS,
    )


def _error_of_look(windows: int) -> float:
    """The probability that this look raises an alarm about an unchanged plan."""
    share = 0.5 / (MAX_WINDOWS - 1)
    return FALSE_ALARM * (share if windows < MAX_WINDOWS else share + 0.5)


def _nothing_speaks_for_change(change: float, spread: float, noise: Noise) -> bool:
    small = abs(np.expm1(change)) < MIN_EFFECT
    return bool(small or abs(change) < quantile(1.0 - SUSPICION / 2.0, noise) * spread)


def _ruled_out(change: float, spread: float, noise: Noise) -> bool:
    """Whether a loss of DETECTABLE would have shown."""
    return bool(change - quantile(1.0 - MISSED, noise) * spread > np.log1p(-DETECTABLE))


def quantile(probability: float, noise: Noise) -> float:
    """Student's, with as many degrees of freedom as the noise is known with."""
    return float(stdtrit(noise.freedom, probability))
