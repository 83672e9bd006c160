"""Protocol: the order of measurements of one check. Pure: what was done decides what is next, whoever measures.

A window holds REPEATS steps of the plan with three rounds of the controls before, between and after them. A check goes
on, window by window, until its verdict and, where it is worse, the cause are decided, or MAX_WINDOWS are over. A
measurement that failed is taken again, MAX_FAILURES times in a check at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from statistics import median

from autotune.cost.parameters import total_parameters
from autotune.regression.verdict import REPEATS
from autotune.search.profiling import LARGEST_BYTES
from autotune.specs import (
    BestEntry,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    FailureKind,
    LayerPart,
    LayerReading,
    LayerRequest,
    ProbeOutcome,
    ProbeRequest,
    StepReading,
    StepRequest,
)
from autotune.specs.regression import CheckMeasurement, CheckRole, CheckWindow, RankTrace, StepTrace

ORDER = "CSSCSSSC"
"""One window: C is a round of all controls, S a step probe."""

MAX_FAILURES = 3
MAX_PAUSE = timedelta(minutes=30)
"""A check that pauses for longer is abandoned: its windows would be of different times."""

WARMUP_STEPS, MIN_STEPS, MORE_STEPS = 2, 3, 3
"""At least so many steps are timed, and so many more where they differ."""

STEPS_S, MAX_SHORT_STEPS = 2.0, 40
"""Short steps are timed for this long, at most this many of them: a tenth of a second shows a moment only."""

CONTROL_S, MIN_ITERATIONS, MAX_ITERATIONS = 0.3, 15, 200
"""A control is repeated for about this long, judged by how long it took the last time in this check."""

MIN_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The next measurement of a check."""

    number: int
    window: int
    role: CheckRole
    request: ProbeRequest


def controls(entry: BestEntry) -> dict[CheckRole, ProbeRequest]:
    """The controls that the entry's cluster and plan have: links between the ranks that there are, one layer."""
    cluster, plan = entry.cluster, entry.plan
    found: dict[CheckRole, ProbeRequest] = {}
    if cluster.gpus_per_node > 1:
        found[CheckRole.LINK_INSIDE] = _all_reduce(entry, cluster.gpus_per_node, 1)
    if cluster.nodes > 1:
        found[CheckRole.LINK_ACROSS] = _all_reduce(entry, cluster.nodes, cluster.gpus_per_node)
    found[CheckRole.KERNELS] = LayerRequest(
        model=entry.model,
        workload=entry.workload.probed,
        part=LayerPart.LAYER,
        tp=plan.tp,
        micro_batch=plan.micro_batch,
        recompute=plan.recompute,
        sequence_parallel=plan.sequence_parallel,
        iterations=MIN_ITERATIONS,
    )
    return found


def step_of(entry: BestEntry) -> StepRequest:
    """The plan's own measurement: few steps, one of them traced."""
    least = least_steps(entry.workload.tokens_per_step / (entry.tokens_per_s_per_gpu * entry.cluster.devices))
    return StepRequest(
        model=entry.model,
        workload=entry.workload,
        plan=entry.plan,
        warmup_steps=WARMUP_STEPS,
        min_steps=least,
        max_steps=least + MORE_STEPS,
    )


def least_steps(step_s: float) -> int:
    """How many steps of that duration are timed in one measurement at least."""
    return max(MIN_STEPS, min(MAX_SHORT_STEPS, ceil(STEPS_S / step_s)))


def order_of(entry: BestEntry) -> Sequence[tuple[CheckRole, ProbeRequest]]:
    """The measurements of one window, in order."""
    rounds, step = list(controls(entry).items()), (CheckRole.WINNER, step_of(entry))
    return [each for letter in ORDER for each in ([step] if letter == "S" else rounds)]


def next_request(entry: BestEntry, done: Sequence[CheckMeasurement], *, again: bool) -> Wanted | None:
    """The measurement that comes next; None when the check is to be concluded.

    Args:
        entry: what is checked.
        done: all measurements so far, by number.
        again: whether another window is wanted once the present one is complete.
    """
    if given_up(done) is not None:
        return None
    order = order_of(entry)
    good = [item for item in done if item.speed is not None]
    window = len(good) // len(order)
    role, request = order[len(good) % len(order)]
    if good and len(good) % len(order) == 0 and not again:
        return None
    last = next((item.speed for item in reversed(good) if item.role is role), None)
    if last is not None:
        request = _long_enough(request, last)
    return Wanted(number=len(done), window=window, role=role, request=request)


def given_up(done: Sequence[CheckMeasurement]) -> CheckMeasurement | None:
    """The failure that ends a check: of memory the second one of the plan, else one too many."""
    failed = [item for item in done if item.speed is None]
    memory = [item for item in failed if item.failure is FailureKind.OOM and item.role is CheckRole.WINNER]
    if len(memory) >= 2:
        return memory[-1]
    return failed[-1] if len(failed) >= MAX_FAILURES else None


def is_interrupted(done: Sequence[CheckMeasurement], started_at: datetime, now: datetime) -> bool:
    """Whether a check that is gone on with now would be one of two different times."""
    return now - max((item.at for item in done), default=started_at) > MAX_PAUSE


def measured(wanted: Wanted, outcome: ProbeOutcome, at: datetime) -> CheckMeasurement:
    """A probe's end as a measurement of the check."""
    speed, trace, peak_bytes = _figures(outcome)
    failure = outcome.failure
    return CheckMeasurement(
        number=wanted.number,
        window=wanted.window,
        role=wanted.role,
        at=at,
        gpu_s=outcome.gpu_s,
        speed=speed,
        trace=trace,
        peak_bytes=peak_bytes,
        failure=failure.kind if failure else None if speed else FailureKind.CRASH,
        message=failure.message if failure else "" if speed else "the probe gave no reading",
    )


def windows_of(done: Sequence[CheckMeasurement]) -> list[CheckWindow]:
    """The complete windows and one begun that holds steps and controls enough to be of use."""
    good = [item for item in done if item.speed is not None]
    found = []
    for number in sorted({item.window for item in good}):
        items = [item for item in good if item.window == number]
        steps = [item for item in items if item.role is CheckRole.WINNER]
        if len(steps) >= REPEATS:
            found.append(_window(items, steps))
    return found


def _window(items: Sequence[CheckMeasurement], steps: Sequence[CheckMeasurement]) -> CheckWindow:
    speeds: dict[CheckRole, tuple[float, ...]] = {}
    for role in CheckRole:
        values = tuple(item.speed for item in items if item.role is role and item.speed is not None)
        if values:
            speeds[role] = values
    peaks = [item.peak_bytes for item in steps if item.peak_bytes is not None]
    return CheckWindow(
        at=items[0].at,
        speeds=speeds,
        trace=_middle([item.trace for item in steps if item.trace is not None]),
        peak_bytes=max(peaks, default=None),
    )


def _middle(traces: Sequence[StepTrace]) -> StepTrace | None:
    """Medians over repeats: of the means over ranks, and rank by rank."""
    if not traces:
        return None
    figures = {name: median(getattr(item, name) for item in traces) for name in ("step_s", "calc_s", "comm_s")}
    ranks = []
    for index, first in enumerate(traces[0].ranks):
        same = [item.ranks[index] for item in traces if len(item.ranks) == len(traces[0].ranks)]
        ranks.append(first.model_copy(update={"calc_s": median(item.calc_s for item in same)}))
    return StepTrace(**figures, exposed_s=median(item.exposed_s for item in traces), ranks=tuple(ranks))


def _all_reduce(entry: BestEntry, size: int, stride: int) -> CollectiveRequest:
    """One message of about what the plan sends at most: its gradients."""
    largest = LARGEST_BYTES[entry.cluster.device.kind]
    gradients = total_parameters(entry.model) / (entry.plan.tp * entry.plan.pp) * entry.workload.gradients.size_bytes
    bytes_ = round(min(max(gradients, MIN_BYTES), largest))
    return CollectiveRequest(
        op=CollectiveOp.ALL_REDUCE,
        group_size=size,
        stride=stride,
        sizes_bytes=(bytes_ - bytes_ % (4 * size),),
        iterations=MIN_ITERATIONS,
    )


def _long_enough(request: ProbeRequest, speed: float) -> ProbeRequest:
    """A control with as many iterations as fill CONTROL_S, when one went at that speed."""
    match request:
        case CollectiveRequest(group_size=size, sizes_bytes=(bytes_, *_)):
            once_s = 2 * (size - 1) / size * bytes_ / speed  # of an all-reduce: the definition of its bus bandwidth
        case LayerRequest(tp=1):  # with others its collectives take time too, which the speed does not tell
            once_s = 1.0 / speed
        case _:
            return request
    count = max(MIN_ITERATIONS, min(MAX_ITERATIONS, ceil(CONTROL_S / once_s)))
    return request.model_copy(update={"iterations": count})


def _figures(outcome: ProbeOutcome) -> tuple[float | None, StepTrace | None, int | None]:
    for reading in outcome.readings:
        if isinstance(reading, StepReading):
            return reading.tokens_per_s_per_gpu or None, _trace(reading), reading.peak_reserved_bytes
        if isinstance(reading, CollectiveReading):
            return reading.busbw_bytes_per_s or None, None, None
        if isinstance(reading, LayerReading):
            time_s = reading.forward_calc_s + reading.backward_calc_s
            return 1.0 / time_s if time_s else None, None, reading.peak_bytes
    return None, None, None


def _trace(reading: StepReading) -> StepTrace | None:
    if reading.traced_step_s is None or reading.t_calc_s is None:
        return None
    assert reading.t_comm_s is not None
    assert reading.t_comm_exposed_s is not None
    return StepTrace(
        step_s=reading.traced_step_s,
        calc_s=reading.t_calc_s,
        comm_s=reading.t_comm_s,
        exposed_s=reading.t_comm_exposed_s,
        ranks=tuple(
            RankTrace(rank=rank.rank, hostname=rank.hostname, calc_s=rank.t_calc_s, peak_bytes=rank.peak_reserved_bytes)
            for rank in reading.ranks
            if rank.t_calc_s is not None
        ),
    )
