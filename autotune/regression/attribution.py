"""Attribution: whose fault a loss is. Pure. "Cannot tell" is an answer; a wrong name is none.

The loss, as ln of the step's time, is compared with what could explain it:

1. memory: the worst rank has next to nothing left now, and had before;
2. one rank, or all ranks of one node: it computes longer than it did, by more than the others do, and by at least
   half of the loss;
3. a control that is slower (a link inside nodes or across them, the kernels): what the step can lose by that lies
   between two bounds from the baseline's trace. For kernels both are T_calc's share times the slowdown; for links the
   lower one takes the exposed communication, the upper one all of it. It explains the loss if the upper bound reaches
   half of it;
4. software: the environment is another one than the baseline's, and no control says that it is the hardware;
5. the plan itself: the environment is the same, every control was measured, and all of them together cannot explain
   half of the loss even at the far end of their noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from autotune.knowledge.nearness import Change
from autotune.regression.protocol import controls
from autotune.regression.verdict import quantile
from autotune.regression.windows import Noise, Window, level
from autotune.specs import BestEntry
from autotune.specs.regression import Attribution, CauseKind, CheckRole, CheckWindow, ControlChange, StepTrace

# One bad rank or node: who computes longer than at the baseline, while the others do not. Pure.
#
# The growth of a rank is ln of its computing time in traced steps, now over its own at the baseline, so that stages of
# different work are compared fairly; its excess is the growth less the median of the others'. Excesses of baseline
# windows among each other tell the noise.

MIN_EXCESS = 0.05
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
    limit = max(MIN_EXCESS, SDS * _noise(ranks, before) / float(np.sqrt(len(now))))
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


FULL = 0.97
"""From this share of a device's memory on, an allocator frees memory and tries again instead of failing: steps slow
down."""


def peak_of(windows: Sequence[CheckWindow]) -> int | None:
    """The worst rank's peak in any window."""
    return max((window.peak_bytes for window in windows if window.peak_bytes is not None), default=None)


def memory_cause(entry: BestEntry, baseline: Sequence[CheckWindow], now: Sequence[CheckWindow]) -> Attribution | None:
    """Memory that is full now and was not; None otherwise."""
    before_bytes, now_bytes = peak_of(baseline), peak_of(now)
    limit = FULL * entry.cluster.device.memory_bytes
    if before_bytes is None or now_bytes is None or not before_bytes < limit <= now_bytes:
        return None
    total = entry.cluster.device.memory_bytes
    text = f"the worst rank holds {now_bytes / total:.0%} of its memory now, and {before_bytes / total:.0%} before"
    return Attribution(kind=CauseKind.MEMORY, subject="memory of the worst rank", text=text)


def out_of_memory(message: str) -> Attribution:
    """The cause of a plan that does not run any more."""
    return Attribution(
        kind=CauseKind.MEMORY, subject="memory of the worst rank", text=f"it ran out of memory: {message}"
    )


CONTROL_ERROR = 0.01
"""Probability that a control that did not change is taken for a slower one, one look."""

MIN_SLOWDOWN = 0.02
ENOUGH = 0.5
"""The share of a loss that a cause must be able to explain."""

CLEAR = 0.8
"""From this share of a step's growth on it was computing that grew, or was not."""

KINDS = {
    CheckRole.LINK_INSIDE: CauseKind.LINK_INSIDE,
    CheckRole.LINK_ACROSS: CauseKind.LINK_ACROSS,
    CheckRole.KERNELS: CauseKind.KERNELS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseEvidence:
    """All that an attribution depends on.

    Args:
        entry: what was checked.
        loss: ln of the step's time now over the baseline's; above zero.
        baseline: its windows.
        now: the check's.
        roles: windows of each control: of the baseline and of now.
        noises: of each control.
        changed: what of the environment is another one than the baseline's.
    """

    entry: BestEntry
    loss: float
    baseline: Sequence[CheckWindow]
    now: Sequence[CheckWindow]
    roles: dict[CheckRole, tuple[Sequence[Window], Sequence[Window]]]
    noises: dict[CheckRole, Noise]
    changed: Sequence[Change] = ()


def attribute(evidence: CauseEvidence) -> Attribution:
    """The cause of a loss, with how every control changed."""
    trace = _typical(evidence.baseline)
    found = [_control(role, evidence, trace) for role in controls(evidence.entry)]
    cause = (
        _moved(evidence)
        or memory_cause(evidence.entry, evidence.baseline, evidence.now)
        or slow_ranks(evidence.entry, evidence.baseline, evidence.now, enough=ENOUGH * evidence.loss)
        or _slower_control(evidence, found)
        or _software(evidence)
        or _plan(evidence, found)
    )
    changed = tuple(item.text for item in evidence.changed)
    return cause.model_copy(update={"controls": tuple(found), "changed": changed})


def _moved(evidence: CauseEvidence) -> Attribution | None:
    """Windows on different nodes say nothing of any of them."""
    traces = [window.trace for window in evidence.now if window.trace is not None]
    places = {tuple(rank.hostname for rank in trace.ranks) for trace in traces}
    if len(places) < 2:
        return None
    return Attribution(kind=CauseKind.CANNOT_TELL, text="the check was measured on other nodes from window to window")


def _control(role: CheckRole, evidence: CauseEvidence, trace: StepTrace | None) -> ControlChange:
    before, now = evidence.roles.get(role, ((), ()))
    if not before or not now:
        return ControlChange(role=role, known=False)
    noise = evidence.noises[role]
    change = level(now) - level(before)
    spread = float(np.sqrt(noise.variance(before) + noise.variance(now)))
    half = quantile(1.0 - CONTROL_ERROR / 2.0, noise) * spread
    low, high = change - half, change + half
    return ControlChange(
        role=role,
        effect=float(np.expm1(change)),
        interval=(float(np.expm1(low)), float(np.expm1(high))),
        slower=bool(high < 0.0 and -change >= np.log1p(MIN_SLOWDOWN)),
        step_effect=_step_effect(role, evidence.entry, trace, (-high, -change, -low)),
    )


def _step_effect(
    role: CheckRole, entry: BestEntry, trace: StepTrace | None, slowdown: tuple[float, float, float]
) -> tuple[float, float, float]:
    """By how much (ln) the step becomes slower if the control is by between the first and the last of `slowdown`."""
    mild, measured, strong = (max(by, 0.0) for by in slowdown)
    if trace is None or not trace.step_s:
        return 0.0, measured, strong
    least = most = trace.calc_s / trace.step_s
    if role is not CheckRole.KERNELS:
        least, most = trace.exposed_s / trace.step_s, max(trace.comm_s, trace.exposed_s) / trace.step_s
        inside, across = _levels(entry)
        mine, other = (inside, across) if role is CheckRole.LINK_INSIDE else (across, inside)
        if not mine:
            return 0.0, 0.0, 0.0
        least = 0.0 if other else least  # which of the two levels is exposed, the trace does not tell
    return _longer(least, mild), _longer(most, measured), _longer(most, strong)


def _longer(share: float, by: float) -> float:
    """ln of a step of which a share takes exp(by) times as long."""
    return float(np.log1p(share * np.expm1(by)))


def _together(found: Sequence[ControlChange]) -> float:
    """The most (ln) that all controls explain: what was measured, and their noises, which are independent, on top."""
    measured = sum(item.step_effect[1] for item in found)
    return float(measured + np.sqrt(sum((item.step_effect[2] - item.step_effect[1]) ** 2 for item in found)))


def _levels(entry: BestEntry) -> tuple[bool, bool]:
    """Whether ranks of one group talk inside nodes, and across them (tp innermost, pp outermost)."""
    size, stride = entry.cluster.gpus_per_node, 1
    inside = across = False
    for axis in ("tp", "cp", "dp", "pp"):
        degree = int(getattr(entry.plan, axis))
        inside |= degree > 1 and stride < size
        across |= degree > 1 and stride * degree > size
        stride *= degree
    return inside, across


def _typical(windows: Sequence[CheckWindow]) -> StepTrace | None:
    """Medians over windows."""
    traces = [window.trace for window in windows if window.trace is not None]
    if not traces:
        return None
    return StepTrace(
        step_s=median(item.step_s for item in traces),
        calc_s=median(item.calc_s for item in traces),
        comm_s=median(item.comm_s for item in traces),
        exposed_s=median(item.exposed_s for item in traces),
    )


def _slower_control(evidence: CauseEvidence, found: Sequence[ControlChange]) -> Attribution | None:
    able = [item for item in found if item.slower and item.step_effect[2] >= ENOUGH * evidence.loss]
    if len(able) > 1:
        able = _where_it_was_lost(able, evidence)
    if not able:
        return None
    worst = max(able, key=lambda item: item.step_effect[0] + item.step_effect[2])
    rivals = [item for item in able if item is not worst and item.step_effect[2] >= 0.5 * worst.step_effect[2]]
    if rivals:
        names = " and ".join(subject_of(evidence.entry, item.role) for item in (worst, *rivals))
        text = f"{names} are slower, and either may explain the loss"
        return Attribution(kind=CauseKind.CANNOT_TELL, text=text)
    subject = subject_of(evidence.entry, worst.role)
    text = f"{subject} is at {1.0 + worst.effect:.0%} of its speed at the baseline"
    if evidence.changed:
        names = "; ".join(item.text for item in evidence.changed)
        text += f", since the environment changed ({names}): the software may be why"
        return Attribution(kind=CauseKind.SOFTWARE, subject=_names(evidence.changed), text=text)
    return Attribution(kind=KINDS[worst.role], subject=subject, text=text)


def _where_it_was_lost(able: Sequence[ControlChange], evidence: CauseEvidence) -> list[ControlChange]:
    """Of several slower controls those that are about where the traced steps grew; all where that is not clear."""
    before, now = _typical(evidence.baseline), _typical(evidence.now)
    if before is None or now is None or now.step_s <= before.step_s:
        return list(able)
    computing = (now.calc_s - before.calc_s) / (now.step_s - before.step_s)
    if computing >= CLEAR:
        return [item for item in able if item.role is CheckRole.KERNELS] or list(able)
    if computing <= 1.0 - CLEAR:
        return [item for item in able if item.role is not CheckRole.KERNELS] or list(able)
    return list(able)


def subject_of(entry: BestEntry, role: CheckRole) -> str:
    """What a control measures, by the name that it has in the cluster."""
    cluster = entry.cluster
    if role is CheckRole.LINK_ACROSS:
        return f"link {cluster.inter.name if cluster.inter else ''} across nodes of {cluster.name}"
    if role is CheckRole.LINK_INSIDE:
        return f"link {cluster.intra.name} inside nodes of {cluster.name}"
    return f"computing on {cluster.device.name} in {cluster.name}"


def _software(evidence: CauseEvidence) -> Attribution | None:
    if not evidence.changed:
        return None
    names = "; ".join(item.text for item in evidence.changed)
    text = f"the environment changed since the baseline ({names}), and no control is slower"
    return Attribution(kind=CauseKind.SOFTWARE, subject=_names(evidence.changed), text=text)


def _names(changed: Sequence[Change]) -> str:
    return ", ".join(item.name for item in changed)


def _plan(evidence: CauseEvidence, found: Sequence[ControlChange]) -> Attribution:
    unknown = [subject_of(evidence.entry, item.role) for item in found if not item.known]
    most = _together(found)
    if not unknown and most < ENOUGH * evidence.loss:
        text = (
            "the links and the kernels are as fast as they were and the environment is the same: "
            "the plan's own step is slower (the step's code, or data)"
        )
        return Attribution(kind=CauseKind.PLAN, subject=evidence.entry.plan.key, text=text)
    if unknown:
        text = f"not measured beside the baseline: {', '.join(unknown)}"
    else:
        text = f"the controls' noise leaves room for {np.expm1(most):.1%} of a loss of {np.expm1(evidence.loss):.1%}"
    return Attribution(kind=CauseKind.CANNOT_TELL, text=text)
