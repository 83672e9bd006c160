"""What a backtest reports of a group: how soon the search was there, and how right the estimate was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from autotune.backtest.groups import Group
from autotune.backtest.runs import RunStatus
from autotune.cost.estimate import NINETY_PERCENT
from autotune.cost.table import Floats
from autotune.specs import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How a search went. None of it depends on an estimate.

    Args:
        trials_to_95: asks until the best told reached 0.95 of the group's best. Failed trials count. One more than
            the most that were allowed (or than there are plans) if it never did.
        trials_to_98: the same for 0.98.
        first_pick: the first asked plan's speed over the best; 0 if it failed.
        first_status: how the first asked plan ended.
        oom_trials: share of the asks up to trials_to_98 that ran out of memory.
    """

    trials_to_95: int
    trials_to_98: int
    first_pick: float
    first_status: RunStatus
    oom_trials: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is believed of each plan of a group, in the group's order.

    Args:
        tokens_per_s_per_gpu: predicted, [plans].
        log_sd: standard deviation of its logarithm, [plans].
        peak_bytes: predicted peak that counts against the device's memory, [plans].
        fits: whether it is believed to fit (probability of at least one half), [plans].
        safe: whether it is believed to fit safely (search.peaks.SAFE), [plans].
        told: whether its own result is behind what is believed of it, [plans].
    """

    tokens_per_s_per_gpu: Floats
    log_sd: Floats
    peak_bytes: Floats
    fits: NDArray[np.bool_]
    safe: NDArray[np.bool_]
    told: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How right a forecast is. None where the group has nothing to judge it by.

    Regret is what a user loses who stops now, so plans that were told compete with what is known of them. Everything
    else is of the plans that were not told: no forecast is judged by a result behind it.

    Args:
        regret_top1: 1 - measured speed of the plan ranked first among those believed to fit / the best; a failed
            plan has speed 0. Among all plans if none is believed to fit, but never a plan that was told to fail.
        regret_top3: the same for the best of the first three.
        kendall: Kendall's tau-b of predicted and measured speed over the ok plans.
        mape: mean |predicted / measured step time - 1| over the ok plans.
        coverage: share of the ok plans whose speed is within the interval that holds it with 90 %.
        mem_mape: mean |predicted / measured peak - 1| over the ok plans whose reserved peak is known.
        oom_recall: share of the plans that ran out of memory that were predicted not to fit safely.
        oom_false_alarm: share of the ok plans that were predicted not to fit safely.
    """

    regret_top1: float
    regret_top3: float
    kendall: float | None
    mape: float | None
    coverage: float | None
    mem_mape: float | None
    oom_recall: float | None
    oom_false_alarm: float | None


def walk_of(group: Group, asked: Sequence[int], most: int) -> Walk:
    """Judges the order in which plans were asked.

    Args:
        group: the plans.
        asked: their indices, in order.
        most: asks that were allowed.
    """
    shares = group.speeds[list(asked)] / group.best
    counted = [group.outcomes[i].status for i in asked[: _trials_to(0.98, shares, most)]]
    return Walk(
        trials_to_95=_trials_to(0.95, shares, most),
        trials_to_98=_trials_to(0.98, shares, most),
        first_pick=float(shares[0]),
        first_status=group.outcomes[asked[0]].status,
        oom_trials=counted.count(RunStatus.OOM) / len(counted),
    )


def _trials_to(share: float, shares: Floats, most: int) -> int:
    reached = np.flatnonzero(shares >= share)
    return int(reached[0]) + 1 if len(reached) else most + 1


def accuracy_of(group: Group, forecast: Forecast) -> Accuracy:
    """Judges a forecast by the group's runs."""
    ok = np.array([item.ok for item in group.outcomes]) & ~forecast.told
    oom = np.array([item.status is RunStatus.OOM for item in group.outcomes]) & ~forecast.told
    speeds, predicted = group.speeds[ok], forecast.tokens_per_s_per_gpu[ok]
    tau = float(kendalltau(predicted, speeds).statistic) if len(speeds) > 1 else np.nan
    cpu = group.cluster.device.kind is DeviceKind.CPU
    peaks = np.array([(item.allocated_bytes if cpu else item.reserved_bytes) or 0.0 for item in group.outcomes])
    known = ok & (peaks > 0)
    return Accuracy(
        regret_top1=_regret(group, forecast, 1),
        regret_top3=_regret(group, forecast, 3),
        kendall=None if np.isnan(tau) else tau,
        mape=_mean(np.abs(speeds / predicted - 1.0)),
        coverage=_mean(np.abs(np.log(speeds / predicted)) <= NINETY_PERCENT * forecast.log_sd[ok]),
        mem_mape=_mean(np.abs(forecast.peak_bytes[known] / peaks[known] - 1.0)),
        oom_recall=_mean(~forecast.safe[oom]),
        oom_false_alarm=_mean(~forecast.safe[ok]),
    )


def _mean(values: NDArray[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _regret(group: Group, forecast: Forecast, picks: int) -> float:
    possible = ~(forecast.told & (group.speeds == 0))
    allowed = possible & forecast.fits if (possible & forecast.fits).any() else possible
    score = np.where(allowed, forecast.tokens_per_s_per_gpu, -np.inf)
    first = np.argsort(-score, kind="stable")[: min(picks, int(allowed.sum()))]
    return float(1.0 - group.speeds[first].max(initial=0.0) / group.best)
