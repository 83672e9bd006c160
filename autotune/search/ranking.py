"""Ranking: measured plans, fastest first, with repeats of a plan pooled; which differences the measurements show, and
the best plan with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from autotune.search.posterior import Observation
from autotune.search.repeats import believed, pooled, scatter
from autotune.specs import ClusterSpec, DeviceKind, Plan, StepReading, Trial, TrialState

# Ranking: measured plans, fastest first, with repeats of a plan pooled.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A measured plan: its mean over the repeats that count (search.repeats) and the interval around it (95 %).

    Args:
        plan: what was measured.
        tokens_per_s_per_gpu: mean of `speeds`, of three or more without those that something held up.
        interval: around the mean; of one run that of its steps, of several Student's over runs.
        speeds: tokens/s/GPU of each run, in order.
        last: how many measurements of any plan came before its newest one.
        peak_bytes: the highest of all runs.
    """

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    speeds: tuple[float, ...]
    last: int = 0
    peak_bytes: float

    @property
    def repeats(self) -> int:
        """Runs that were measured."""
        return len(self.speeds)


def observation(plan: Plan, reading: StepReading, cluster: ClusterSpec, gpu_s: float | None = None) -> Observation:
    """What a reading teaches."""
    low, high = reading.interval_tokens_per_s_per_gpu
    mean = reading.tokens_per_s_per_gpu
    return Observation(
        plan=plan,
        tokens_per_s_per_gpu=mean,
        relative_noise=(high - low) / (2.0 * mean) if mean else 0.0,
        peak_bytes=float(peak_memory_bytes(reading, cluster)),
        pruned=reading.pruned,
        gpu_s=gpu_s,
    )


def peak_memory_bytes(reading: StepReading, cluster: ClusterSpec) -> int:
    """What counts against a device's memory: what a GPU's allocator reserved; on CPU the accounted tensors."""
    if cluster.device.kind is DeviceKind.CPU:
        return reading.peak_allocated_bytes
    return max(reading.peak_allocated_bytes, reading.peak_reserved_bytes)


def ranking(observations: Iterable[Observation]) -> list[RankedPlan]:
    """All fully measured plans (neither failed nor pruned), fastest first."""
    found: dict[Plan, list[Observation]] = {}
    last: dict[Plan, int] = {}
    for number, item in enumerate(observations):
        if item.whole:
            found.setdefault(item.plan, []).append(item)
            last[item.plan] = number
    pooled = (_pooled(plan, items, last[plan]) for plan, items in found.items())
    return sorted(pooled, key=lambda ranked: -ranked.tokens_per_s_per_gpu)


def ranking_of(trials: Iterable[Trial], cluster: ClusterSpec) -> list[RankedPlan]:
    """The ranking of stored trials."""
    return ranking(observation(item.plan, item.reading, cluster) for item in trials if item.reading is not None)


def _pooled(plan: Plan, items: Sequence[Observation], last: int) -> RankedPlan:
    """Mean of repeats. The interval is the wider of the repeats' own and of Student's over the spread between them.

    Both are of ln(throughput): the interval is a factor each way, and never reaches below zero.
    """
    speeds = [item.tokens_per_s_per_gpu or 0.0 for item in items]
    kept = believed(speeds)
    mean, count = pooled(speeds), len(kept)
    own = np.array([item.relative_noise for item in items], dtype=np.float64)
    half = float(np.sqrt(np.mean(own**2)))
    if count > 1:
        half = max(half, float(stdtrit(count - 1, 0.975)) * float(np.std(np.log(kept), ddof=1)))
    factor = float(np.exp(half / np.sqrt(count)))
    return RankedPlan(
        plan=plan,
        tokens_per_s_per_gpu=mean,
        interval=(mean / factor, mean * factor),
        speeds=tuple(float(value) for value in speeds),
        last=last,
        peak_bytes=max((item.peak_bytes or 0.0 for item in items), default=0.0),
    )


# Comparison: which of the measured plans is the fastest, and which differences the measurements cannot decide.
#
# Repeats of a plan differ by more than the steps within one run do, so only repeats tell how sure a difference is. The
# method, in full, is in docs/explanations.md.

# Contenders are the plans that may be the best one: so close to the fastest, and so many, at most.
CONTENDER_SHARE = 0.9
MAX_CONTENDERS = 3
MIN_REPEATS = 3
MAX_REPEATS = 5
NOISY = 0.05

# A difference is looked at after every repeat, and each look may err. 2 % a look, shared among the challengers, keep
# the chance that equal plans are ever told apart under 5 % (simulated in tests/unit/test_comparison.py).
ERROR_A_LOOK = 0.02

# Of plans that cannot be told apart the one with more free memory is preferred, but not for more speed than this.
MAX_GIVEN_UP = 0.02

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

    best: RankedPlan
    tied: Sequence[RankedPlan]
    reason: str


def difference(one: RankedPlan, other: RankedPlan, *, error: float = 0.05) -> Difference:
    """Welch's interval of the difference of mean ln(throughput) over repeats.

    With s² the variance over n repeats and q = s²/n of each plan, the interval is d ± t(1 - error/2, v) sqrt(q1 + q2)
    with v = (q1 + q2)² / (q1²/(n1 - 1) + q2²/(n2 - 1)) (Welch 1947, Biometrika 34; Satterthwaite 1946). Logarithms
    make it a relative one. A plan with fewer than MIN_REPEATS repeats leaves everything open: infinite bounds.
    """
    first, second = np.log(believed(one.speeds)), np.log(believed(other.speeds))
    middle = float(np.mean(first) - np.mean(second))
    if min(len(first), len(second)) < MIN_REPEATS:
        return Difference(faster=float(np.expm1(middle)), low=-1.0, high=float("inf"))
    q1, q2 = (float(np.var(values, ddof=1)) / len(values) for values in (first, second))
    half = 0.0
    if q1 + q2 > 0.0:
        freedom = (q1 + q2) ** 2 / (q1**2 / (len(first) - 1) + q2**2 / (len(second) - 1))
        half = float(stdtrit(freedom, 1.0 - error / 2.0)) * float(np.sqrt(q1 + q2))
    low, high = np.expm1([middle - half, middle + half])
    return Difference(faster=float(np.expm1(middle)), low=float(low), high=float(high))


def contenders(ranking: Sequence[RankedPlan]) -> Sequence[RankedPlan]:
    """The plans that may be the best one, fastest first: within 10 % of the fastest, three at most.

    Where runs of a plan differ by more than NOISY, so do those of others: then within two standard deviations, and
    twice as many. Two runs do not tell which of them was held up: the faster one counts until there is a third.
    """
    if not ranking:
        return ()
    noise = noise_of(ranking)
    share, most = (CONTENDER_SHARE, MAX_CONTENDERS) if noise <= NOISY else (np.exp(-2.0 * noise), 2 * MAX_CONTENDERS)
    least = min(share, CONTENDER_SHARE) * ranking[0].tokens_per_s_per_gpu
    first, *others = ranking
    return [first, *[item for item in others if _may_reach(item) >= least][: most - 1]]


def _may_reach(item: RankedPlan) -> float:
    return max(item.speeds) if item.repeats < MIN_REPEATS else item.tokens_per_s_per_gpu


def noise_of(ranking: Sequence[RankedPlan]) -> float:
    """Standard deviation of ln(throughput) between runs of a plan; 0 where no plan was run twice."""
    return scatter(item.speeds for item in ranking if item.repeats > 1) or 0.0


def most_repeats(ranking: Sequence[RankedPlan]) -> int:
    """Runs of a plan after which plans that are still not told apart are left so."""
    return MAX_REPEATS if noise_of(ranking) <= NOISY else 2 * MAX_REPEATS


def undecided(ranking: Sequence[RankedPlan]) -> Sequence[RankedPlan]:
    """The contenders that the measurements cannot tell from the fastest plan; without the fastest itself."""
    close = contenders(ranking)
    error = ERROR_A_LOOK / max(len(close) - 1, 1)
    return [item for item in close[1:] if not difference(close[0], item, error=error).decided]


def decide(ranking: Sequence[RankedPlan]) -> Decision:
    """The plan to use among measured ones (at least one, fastest first).

    Of the plans that cannot be told from the fastest, and give up 2 % of its throughput at most, the one with the
    smallest peak memory: it leaves the most room for what a short trial does not see.
    """
    fastest, close = ranking[0], undecided(ranking)
    best = fastest
    for item in close:
        given_up = 1.0 - item.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
        if given_up <= MAX_GIVEN_UP and item.peak_bytes < (1.0 - SAME_PEAK) * best.peak_bytes:
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


# The best plan of a tuning so far, with its evidence.


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The measured plan to use and its evidence.

    Args:
        ranked: of the plan: the fastest, or one as fast with more free memory.
        trials: its complete trials.
        all_trials: those of all plans.
        runners_up: the other measured plans, fastest first.
        too_close: plans that cannot be told from the fastest, the fastest itself included where it is not this one.
        reason: why this plan and not the fastest; empty where it is the fastest.
    """

    ranked: RankedPlan
    trials: Sequence[Trial]
    all_trials: Sequence[Trial]
    runners_up: Sequence[RankedPlan]
    too_close: Sequence[Plan]
    reason: str


def best_of(trials: Sequence[Trial], cluster: ClusterSpec) -> Best | None:
    """Pools the repeats of each plan and decides; None when no trial is complete."""
    ranking = ranking_of(trials, cluster)
    if not ranking:
        return None
    decision = decide(ranking)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return Best(
        ranked=decision.best,
        trials=[trial for trial in complete if trial.plan == decision.best.plan],
        all_trials=complete,
        runners_up=[item for item in ranking if item is not decision.best],
        too_close=[item.plan for item in decision.tied],
        reason=decision.reason,
    )
