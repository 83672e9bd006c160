"""Comparison: which of the measured plans is the fastest, and which differences the measurements cannot decide.

Repeats of a plan differ by more than the steps within one run do, so only repeats tell how sure a difference is. The
method, in full, is in docs/explanations.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from autotune.search.standing import Standing

# Contenders are the plans that may be the best one: so close to the fastest, and so many, at most.
CONTENDER_SHARE = 0.9
MOST_CONTENDERS = 3
LEAST_REPEATS = 3
MOST_REPEATS = 5
# A difference is looked at after every repeat, and each look may err. 2 % a look, shared among the challengers, keep
# the chance that equal plans are ever told apart under 5 % (simulated in tests/unit/test_comparison.py).
ERROR_A_LOOK = 0.02
# Of plans that cannot be told apart the one with more free memory is preferred, but not for more speed than this.
MOST_GIVEN_UP = 0.02
# Peaks closer than this share are no reason to prefer either plan.
SAME_PEAK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much faster one plan is than another, as a share of the other's throughput, and the interval around it."""

    faster: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan to use, and what cannot be told apart from the fastest.

    Args:
        best: the plan to use: the fastest, or one as fast with more free memory.
        tied: the other plans that the measurements cannot tell from the fastest, the fastest itself included where
            it is not `best`.
        reason: why `best` was preferred to the fastest; empty where it is the fastest.
    """

    best: Standing
    tied: Sequence[Standing]
    reason: str


def difference(one: Standing, other: Standing, *, error: float = 0.05) -> Difference:
    """Welch's interval of the difference of mean ln(throughput) over repeats.

    With s² the variance over n repeats and q = s²/n of each plan, the interval is d ± t(1 - error/2, v) sqrt(q1 + q2)
    with v = (q1 + q2)² / (q1²/(n1 - 1) + q2²/(n2 - 1)) (Welch 1947, Biometrika 34; Satterthwaite 1946). Logarithms
    make it a relative one. A plan with fewer than LEAST_REPEATS repeats leaves everything open: infinite bounds.
    """
    first, second = np.log(one.speeds), np.log(other.speeds)
    middle = float(np.mean(first) - np.mean(second))
    if min(one.repeats, other.repeats) < LEAST_REPEATS:
        return Difference(faster=float(np.expm1(middle)), low=-1.0, high=float("inf"))
    q1, q2 = (float(np.var(values, ddof=1)) / len(values) for values in (first, second))
    half = 0.0
    if q1 + q2 > 0.0:
        freedom = (q1 + q2) ** 2 / (q1**2 / (len(first) - 1) + q2**2 / (len(second) - 1))
        half = float(stdtrit(freedom, 1.0 - error / 2.0)) * float(np.sqrt(q1 + q2))
    low, high = np.expm1([middle - half, middle + half])
    return Difference(faster=float(np.expm1(middle)), low=float(low), high=float(high))


def contenders(standings: Sequence[Standing]) -> Sequence[Standing]:
    """The plans that may be the best one, fastest first: within 10 % of the fastest, three at most."""
    if not standings:
        return ()
    least = CONTENDER_SHARE * standings[0].tokens_per_s_per_gpu
    return [item for item in standings if item.tokens_per_s_per_gpu >= least][:MOST_CONTENDERS]


def undecided(standings: Sequence[Standing]) -> Sequence[Standing]:
    """The contenders that the measurements cannot tell from the fastest plan; without the fastest itself."""
    close = contenders(standings)
    error = ERROR_A_LOOK / max(len(close) - 1, 1)
    return [item for item in close[1:] if not difference(close[0], item, error=error).decided]


def decide(standings: Sequence[Standing]) -> Decision:
    """The plan to use among measured ones (at least one, fastest first).

    Of the plans that cannot be told from the fastest, and give up 2 % of its throughput at most, the one with the
    smallest peak memory: it leaves the most room for what a short trial does not see.
    """
    fastest, close = standings[0], undecided(standings)
    best = fastest
    for item in close:
        given_up = 1.0 - item.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
        if given_up <= MOST_GIVEN_UP and item.peak_bytes < (1.0 - SAME_PEAK) * best.peak_bytes:
            best = item
    tied = [item for item in (fastest, *close) if item is not best]
    reason = ""
    if best is not fastest:
        behind = 1.0 - best.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
        spare = 1.0 - best.peak_bytes / fastest.peak_bytes
        reason = (
            f"preferred for its memory: its peak is {spare:.0%} lower than that of {fastest.plan.key}, "
            f"which measured {behind:.1%} faster but cannot be told apart"
        )
    return Decision(best=best, tied=tied, reason=reason)
