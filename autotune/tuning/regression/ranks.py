"""One bad rank or node: who computes longer than at the baseline, while the others do not. Pure.

The growth of a rank is ln of its computing time in traced steps, now over its own at the baseline, so that stages of
different work are compared fairly; its excess is the growth less the median of the others'. Excesses of baseline
windows among each other tell the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from autotune.specs import BestEntry
from autotune.specs.regression import Attribution, CauseKind, CheckWindow

LEAST_EXCESS = 0.05
PRIOR_SD = 0.02
PRIOR_COUNT = 4
SDS = 4.0
"""How many standard deviations of the noise an excess must have."""


def slow_ranks(
    entry: BestEntry, baseline: Sequence[CheckWindow], now: Sequence[CheckWindow], *, enough: float
) -> Attribution | None:
    """The rank or node that explains a loss; None if there is none.

    Args:
        entry: what was checked.
        baseline: its windows.
        now: the check's.
        enough: ln of the step's time that a rank must have cost.
    """
    before, after = [_calc(window) for window in baseline], [_calc(window) for window in now]
    ranks = sorted(set.intersection(*(set(each) for each in (*before, *after)))) if before and after else []
    if len(ranks) < 2:
        return None
    growths = {rank: _growth(rank, before, after) for rank in ranks}
    limit = max(LEAST_EXCESS, SDS * _noise(ranks, before) / float(np.sqrt(len(now))))
    hosts = _hosts(now)
    node = _slow_node(entry, growths, limit)
    if node is not None:
        members = [rank for rank in ranks if rank // entry.cluster.gpus_per_node == node]
        if _cost(members[0], baseline, growths[members[0]]) >= enough:
            text = (
                f"all ranks of node {hosts[members[0]]} compute {np.exp(growths[members[0]]):.2f} x as long as before"
            )
            return Attribution(kind=CauseKind.NODE, subject=f"node {hosts[members[0]]}", text=text)
    worst = max(ranks, key=lambda rank: growths[rank])
    excess = growths[worst] - median(growths[rank] for rank in ranks if rank != worst)
    if excess < limit or growths[worst] < limit or _cost(worst, baseline, growths[worst]) < enough:
        return None
    second = sorted(growths.values())[-2]
    if second > 0.5 * growths[worst]:
        return None  # two are slow: no single one to name
    text = (
        f"rank {worst} on node {hosts[worst]} computes {np.exp(growths[worst]):.2f} x as long as before, "
        f"the others {np.exp(median(growths[rank] for rank in ranks if rank != worst)):.2f} x"
    )
    return Attribution(kind=CauseKind.RANK, subject=f"rank {worst} on node {hosts[worst]}", text=text)


def _calc(window: CheckWindow) -> dict[int, float]:
    """ln of each rank's computing time."""
    ranks = window.trace.ranks if window.trace is not None else ()
    return {rank.rank: float(np.log(rank.calc_s)) for rank in ranks if rank.calc_s > 0.0}


def _growth(rank: int, before: Sequence[Mapping[int, float]], after: Sequence[Mapping[int, float]]) -> float:
    return median(each[rank] for each in after) - median(each[rank] for each in before)


def _noise(ranks: Sequence[int], windows: Sequence[Mapping[int, float]]) -> float:
    """The standard deviation of a rank's excess from one baseline window to the next."""
    squares = [PRIOR_SD**2] * PRIOR_COUNT
    for one, other in pairwise(windows):
        steps = {rank: other[rank] - one[rank] for rank in ranks}
        middle = median(steps.values())
        squares += [(step - middle) ** 2 / 2.0 for step in steps.values()]
    return float(np.sqrt(np.mean(squares)))


def _slow_node(entry: BestEntry, growths: Mapping[int, float], limit: float) -> int | None:
    """The node all of whose ranks are slower while no other node's are; only where nodes have several ranks."""
    size = entry.cluster.gpus_per_node
    if size < 2 or entry.cluster.nodes < 2:
        return None
    nodes: dict[int, list[float]] = {}
    for rank, growth in growths.items():
        nodes.setdefault(rank // size, []).append(growth)
    slow = [node for node, values in nodes.items() if min(values) >= limit]
    if len(slow) != 1:
        return None
    others = [value for node, values in nodes.items() if node != slow[0] for value in values]
    return slow[0] if max(others) < 0.5 * min(nodes[slow[0]]) else None


def _cost(rank: int, baseline: Sequence[CheckWindow], growth: float) -> float:
    """By how much (ln) the step becomes longer if all of a rank's growth shows."""
    traces = [window.trace for window in baseline if window.trace is not None]
    shares = [each.calc_s / trace.step_s for trace in traces for each in trace.ranks if each.rank == rank]
    return float(np.log1p(median(shares) * np.expm1(growth))) if shares else 0.0


def _hosts(windows: Sequence[CheckWindow]) -> dict[int, str]:
    traces = [window.trace for window in windows if window.trace is not None]
    return {rank.rank: rank.hostname for trace in traces for rank in trace.ranks}
