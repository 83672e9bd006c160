"""Kineto's traces (torch.profiler's export_chrome_trace, plain or gzip) as seconds of computation and communication.

On GPUs the intervals are those of kernels and copies on the device; on CPUs those of torch's operators on the thread
that trains, and of gloo's collectives. What counts as what is as in `probes.trace`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from probes.trace import Spans, TracedSeconds, collective_name, summarize

MAX_BYTES = 1 << 30
"""Of a trace, uncompressed: Python's own objects of it take several times as much memory."""

LONGEST_US = 1e18
"""No event is later or takes longer."""

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_COMPUTING = ("aten::", "fsdp::")
_STEP = re.compile(r"^ProfilerStep#\d+$")
# Kernels that communicate and have other names than NCCL's and RCCL's: mscclpp and MSCCL, oneCCL, NVSHMEM and DeepEP.
_OTHERS = re.compile(r"mscclpp|msccl|nvshmem|deep_ep|rccl|oneccl", re.IGNORECASE)
_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "dispatch": "all_to_all", "combine": "all_to_all", "sendrecv": "send_recv", "broadcast": "broadcast",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank's device did in a trace.

    Args:
        rank: as the trace says it; None where it does not.
        device: the number of the device, or "cpu".
        seconds: computing, communicating, what of it nothing computes under, and by collective.
        counts: how often each collective ran.
        span_s: from the first of these intervals to the end of the last.
        steps: that the profiler counted in it; 0 where it was not told of steps.
    """

    rank: int | None
    device: str
    seconds: TracedSeconds
    counts: Mapping[str, int] = field(default_factory=dict)
    span_s: float
    steps: int

    @property
    def mu(self) -> float | None:
        """T_comm / T_calc; None where nothing computes."""
        return self.seconds.comm_s / self.seconds.calc_s if self.seconds.calc_s else None

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "rank": self.rank, "device": self.device, "steps": self.steps, "span_s": self.span_s,
            "t_calc_s": self.seconds.calc_s, "t_comm_s": self.seconds.comm_s,
            "t_comm_exposed_s": self.seconds.exposed_s, "mu": self.mu,
            "by_collective": {
                name: {"seconds": seconds, "count": self.counts[name]}
                for name, seconds in self.seconds.comm_s_by_op.items()
            },
        }  # fmt: skip


def read_trace(path: Path) -> list[RankTrace]:
    """The figures of each device of a trace.

    Raises:
        InputError: a file that cannot be read, that is no trace or half of one; a trace without communication.
    """
    document = _document(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(str(path), "no traceEvents", "a trace that torch.profiler's export_chrome_trace has written")
    lasting = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and _is_timed(event)]
    info = document.get("distributedInfo") if isinstance(document, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    steps = len({event["name"] for event in lasting if _STEP.match(event["name"])})
    devices = _by_device(lasting)
    found = [
        _summary(rank if isinstance(rank, int) and len(devices) == 1 else None, device, spans, counts, steps)
        for device, (spans, counts) in sorted(devices.items())
    ]
    if not any(each.counts for each in found):
        allowed = (
            "nothing in it communicates (no event of NCCL, RCCL, mscclpp or gloo): a trace of one of several ranks is "
            "needed, on GPUs with ProfilerActivity.CUDA"
        )
        raise InputError(str(path), f"{len(lasting)} events", allowed)
    return found


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as content:
            text = content.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), "a broken gzip file", f"a whole trace is needed ({error})") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(str(path), "file", f"a readable file is needed ({reason})") from None
    if len(text) > MAX_BYTES:
        raise InputError(str(path), "more", f"a trace of at most {MAX_BYTES >> 30} GiB: profile fewer steps")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), "a broken trace", f"whole JSON is needed ({error})") from None


def _is_timed(event: Mapping[str, Any]) -> bool:
    times = event.get("ts"), event.get("dur")
    return isinstance(event.get("name"), str) and all(
        isinstance(time, int | float) and abs(time) < LONGEST_US for time in times
    )


Devices = dict[str, tuple[Spans, Counter[str]]]


def _by_device(events: Sequence[dict[str, Any]]) -> Devices:
    """The spans of each device that kernels ran on; where there are none, those of the CPU."""
    kernels = [event for event in events if event.get("cat") in _DEVICE]
    if not kernels:
        return {"cpu": _host(events)}
    found: Devices = {}
    for event in kernels:
        arguments = event.get("args")
        device = arguments.get("device") if isinstance(arguments, dict) else None
        spans, counts = found.setdefault(str(event.get("pid") if device is None else device), (Spans(), Counter()))
        operation = _operation(event) if event["cat"] == "kernel" else None
        _add(spans, counts, event, operation)
    return found


def _host(events: Sequence[dict[str, Any]]) -> tuple[Spans, Counter[str]]:
    """Operators of the thread that trains, which runs most of them by time, and gloo's collectives of any."""
    operators = [event for event in events if event["name"].startswith(_COMPUTING)]
    busy: Counter[object] = Counter()
    for event in operators:
        busy[event.get("tid")] += event["dur"]
    thread = busy.most_common(1)[0][0] if busy else None
    spans, counts = Spans(), Counter[str]()
    for event in events:
        operation = collective_name(event["name"])
        if operation is not None:
            _add(spans, counts, event, operation)
        elif event.get("tid") == thread and event["name"].startswith(_COMPUTING):
            _add(spans, counts, event, None)
    return spans, counts


def _operation(event: Mapping[str, Any]) -> str | None:
    """The collective that a kernel is; NCCL's generic kernels say it in their arguments."""
    name, arguments = event["name"], event.get("args")
    told = arguments.get("Collective name") if isinstance(arguments, dict) else None
    operation = collective_name(name)
    if operation is None and not _OTHERS.search(name):
        return None
    if operation in {None, "other"}:
        plain = re.sub(r"[^a-z]", "", f"{told or ''}{name}".lower())
        operation = next((ours for theirs, ours in _OPERATIONS.items() if theirs in plain), "other")
    return operation


def _add(spans: Spans, counts: Counter[str], event: Mapping[str, Any], operation: str | None) -> None:
    """Notes an interval; a trace counts in microseconds."""
    start = round(event["ts"] * 1e3)
    interval = start, start + max(round(event["dur"] * 1e3), 0)
    if operation is None:
        spans.computing.append(interval)
    else:
        spans.communicating.setdefault(operation, []).append(interval)
        counts[operation] += 1


def _summary(rank: int | None, device: str, spans: Spans, counts: Counter[str], steps: int) -> RankTrace:
    every = [*spans.computing, *(interval for found in spans.communicating.values() for interval in found)]
    span = (max(end for _, end in every) - min(start for start, _ in every)) / 1e9 if every else 0.0
    return RankTrace(
        rank=rank, device=device, seconds=summarize(spans), counts=dict(counts), span_s=span, steps=steps
    )  # fmt: skip


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """The figures of several files, one a rank, in the order of their ranks. Raises InputError as `read_trace` does."""
    found = [each for path in paths for each in read_trace(path)]
    return sorted(found, key=lambda each: (each.rank is None, each.rank or 0, each.device))
