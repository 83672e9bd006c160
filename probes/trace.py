"""Where a step's time goes: intervals of computation and of communication from one run under torch.profiler.

On CUDA the intervals are those of kernels and copies on the device; a kernel whose name begins with "nccl" (RCCL's do
too) communicates, the others compute. On CPU computation is the time within torch's operators (`aten::`, and the
C++ parts of FSDP) on the thread that trains; the interpreter's and autograd's time between operators is in neither,
as on a GPU it would be host time. Communication is the time from a collective's start to its end on gloo's threads.
Either way waiting for a slower peer within a collective, a receive in the pipeline's bubble for one, counts
as communication: that is how long the rank's communication took.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[int, int]

_MARK = "autotune::traced"
_COMPUTING = ("aten::", "fsdp::")
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "broadcast": "broadcast",
}


@dataclass(slots=True)
class Spans:
    """Intervals in nanoseconds of one rank, as found: overlapping, nested and in any order."""

    computing: list[Interval] = field(default_factory=list)
    communicating: dict[str, list[Interval]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSeconds:
    """Seconds of one traced stretch: computing, communicating, the part of the latter that nothing computes under."""

    calc_s: float
    comm_s: float
    exposed_s: float
    comm_s_by_op: dict[str, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Sequence[Interval]) -> int:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """The length that two ordered, disjoint series have in common."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total


def summarize(spans: Spans) -> TracedSeconds:
    """The figures of a rank's spans."""
    computing = union(spans.computing)
    communicating = union(interval for found in spans.communicating.values() for interval in found)
    return TracedSeconds(
        calc_s=length(computing) / 1e9,
        comm_s=length(communicating) / 1e9,
        exposed_s=(length(communicating) - overlap(communicating, computing)) / 1e9,
        comm_s_by_op={name: length(union(found)) / 1e9 for name, found in sorted(spans.communicating.items())},
    )


def collective_name(event: str) -> str | None:
    """The operation that an event of gloo or NCCL is, in our words; None for an event that is no communication."""
    found = re.match(r"(?:gloo:|nccl(?:Dev)?Kernel_?)([A-Za-z_]+)", event)
    if found is None:
        return None
    name = found.group(1).replace("_", "").lower()
    return next((ours for theirs, ours in _NAMES.items() if name.startswith(theirs)), "other")


class Tracer:
    """A context that profiles what runs in it on one device; `read` then gives the figures.

    Args:
        cuda: whether the work is on a CUDA device.
    """

    def __init__(self, *, cuda: bool) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self.cuda = cuda
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile: Any = profile(activities=activities)
        self._mark: Any = record_function(_MARK)

    def __enter__(self) -> Tracer:
        self._profile.__enter__()
        self._mark.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        self._mark.__exit__(*error)
        self._profile.__exit__(*error)

    def read(self) -> TracedSeconds:
        """The figures of what ran."""
        events = self._profile.profiler.kineto_results.events()
        return summarize(device_spans(events) if self.cuda else host_spans(events))


def host_spans(events: Sequence[Any]) -> Spans:
    """The spans of a CPU rank: operators on the thread that carries the mark, gloo's collectives on any."""
    thread = next(event.start_thread_id() for event in events if event.name() == _MARK)
    spans = Spans()
    for event in events:
        name = event.name()
        if (operation := collective_name(name)) is not None:
            spans.communicating.setdefault(operation, []).append(_interval(event))
        elif event.start_thread_id() == thread and name.startswith(_COMPUTING):
            spans.computing.append(_interval(event))
    return spans


def device_spans(events: Sequence[Any]) -> Spans:
    """The spans of a CUDA rank: what ran on the device, without the ranges that the host only annotated."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    spans = Spans()
    for event in events:
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        if (operation := collective_name(event.name())) is not None:
            spans.communicating.setdefault(operation, []).append(_interval(event))
        else:
            spans.computing.append(_interval(event))
    return spans


def _interval(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()
