"""nccl-tests' output (all_reduce_perf and the like; github.com/NVIDIA/nccl-tests) as collective readings.

Its `size` is ours: the full buffer. Its time is the mean over iterations, averaged over ranks, of one communicator over
all its ranks; the out-of-place column is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from autotune.cost.network import ring_traffic
from autotune.errors import InputError
from autotune.imports.assembly import require_gpu
from autotune.imports.logs import LogFile
from autotune.specs import ClusterSpec, CollectiveOp, CollectiveReading
from autotune.specs.imported import ImportedReading

_NAMES = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "alltoall": CollectiveOp.ALL_TO_ALL,
    "sendrecv": CollectiveOp.SEND_RECV,
}
_TEST = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
_RANK = re.compile(r"^#\s+Rank\s+(\d+) (?:Group\s+(\d+) )?Pid\s+\d+ on\s+(\S+)\s+device\s+\d+ \[[^]]*\] ?(.*?)\s*$")
_RANKS = re.compile(r"^#\s+Rank\s+\d+\b")
_LABELLED = re.compile(r"^(\s*\S.*?)#\s+Rank\s+\d+ .*\bPid\s+\d+ on\s")
_ITERATIONS = re.compile(r"(?<!warmup )\biters: (\d+)")
_COLUMNS = re.compile(r"^#\s+size\s+count\s+type\s+redop\s")
_UNITS = re.compile(r"^#\s+\(B\)\s+\(elements\)\s+\(([^)]*)\)\s+\(([^)]*)\)")
_ROW = re.compile(r"^\s*-?\d+\s+-?\d+\s+[a-z][a-z0-9_]*\s")
_END = "# Avg bus bandwidth"
AGREES, ROUNDING = 0.05, 0.011
"""algbw must be size / time within this share, or within the rounding to two decimals of GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    op: CollectiveOp
    group_size: int
    iterations: int
    first: int
    last: int


def read(file: LogFile, cluster: ClusterSpec) -> tuple[list[ImportedReading], list[str]]:
    """The readings of a log, and notes on what was left out.

    Args:
        file: the log of one test, or of several, one after another.
        cluster: where it ran; the log's ranks must fit on it.

    Raises:
        InputError: a test of another operation, on other hardware, of a layout that the cluster does not have, with
            wrong data, or a figure that cannot be.
    """
    found: list[ImportedReading] = []
    notes = [] if file.cut is None else [f"line {file.cut} is cut off and left out"]
    sweeps = [_sweep(file, part, cluster) for part in _parts(file)]
    sweep, columns, ended = None, list[str](), 0
    for line, text in file:
        if sweep is None or line > sweep.last:
            sweep, columns = next((each for each in sweeps if each.first <= line <= each.last), None), []
        if sweep is None:
            continue
        if _COLUMNS.match(text):
            columns = _columns(file, line, text)
        elif match := _UNITS.match(text):
            if match.groups() != ("us", "GB/s"):
                raise file.bad(line, "units", text.strip("# "), "times must be in us and rates in GB/s")
        elif columns and _ROW.match(text):
            row = text.split()
            if len(row) < columns.index("time") + 4 or not _is_number(row[columns.index("time")]):
                notes.append(f"line {line} is damaged and left out")
                continue
            reading = _reading(file, line, columns, row, sweep)
            if reading is not None:
                found.append(ImportedReading(where=file.where(line), cluster=cluster, reading=reading))
        ended += text.startswith(_END)
    if not found:
        raise InputError(file.name, "no rows", "at least one complete row with a size and its time is needed")
    if ended < len(sweeps):
        which = "the sweep" if len(sweeps) == 1 else f"{len(sweeps) - ended} of {len(sweeps)} sweeps"
        notes.append(f"{which} did not come to its end; its complete rows are taken")
    return found, notes


@dataclass(slots=True, kw_only=True)
class _Part:
    """The lines of one test, from the first that tells of it; `test` is its name where a line has it."""

    first: int
    last: int = 0
    test: tuple[int, str] | None = None
    begun: bool = False
    iterations: int = 1
    ranks: list[tuple[int, str]] = field(default_factory=list)


def _parts(file: LogFile) -> list[_Part]:
    """The tests of a file: each begins where its name or its options (`# nThread`) are printed after another's."""
    parts = [_Part(first=1)]
    for line, text in file:
        named, begins = _TEST.search(text), text.startswith("# nThread")
        if parts[-1].begun and (begins or (named is not None and "concluded" not in text)):
            parts[-1].last = line - 1
            parts.append(_Part(first=line))
        part = parts[-1]
        if named is not None and part.test is None:
            part.test = line, named[1]
        if begins:
            part.begun = True
            if match := _ITERATIONS.search(text):
                part.iterations = file.count(line, "iters", match[1])
        if _RANKS.match(text):
            part.ranks.append((line, text))
        part.last = line
    return parts


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sweep(file: LogFile, part: _Part, cluster: ClusterSpec) -> _Sweep:
    """What a test is of. Raises InputError as `read` does."""
    if part.test is None:
        raise InputError(file.name, "no name of a test", "add the command that made the log as its first line")
    line, name = part.test
    if name not in _NAMES:
        allowed = "must be one of " + ", ".join(f"{each}_perf" for each in _NAMES)
        raise file.bad(line, "test", f"{name}_perf", allowed)
    op, size = _NAMES[name], _group_size(file, part, cluster)
    if op is CollectiveOp.SEND_RECV and size != 2:
        raise InputError(file.name, size, "a sendrecv of 2 ranks is needed: more of them are a ring")
    return _Sweep(op=op, group_size=size, iterations=part.iterations, first=part.first, last=part.last)


def _group_size(file: LogFile, part: _Part, cluster: ClusterSpec) -> int:
    """The number of ranks. They must be on one node, or fill the nodes that they are on: then their stride is 1."""
    hosts: Counter[str] = Counter()
    seen: dict[int, int] = {}
    for line, text in part.ranks:
        if match := _RANK.match(text):
            if match[2] not in {None, "0"}:
                raise file.bad(line, "group", match[2], "one communicator over all ranks is needed (no split)")
            rank = file.step(line, match[1])
            if rank in seen:
                raise file.bad(line, "rank", rank, f"line {seen[rank]} has it too: the output of one test is needed")
            require_gpu(file, line, match[4], cluster)
            seen[rank] = line
            hosts[match[3]] += 1
        else:
            raise file.bad(line, "rank", text, "must be `#  Rank N Group N Pid N on HOST device N [BUS] GPU`")
    size, local = hosts.total(), cluster.gpus_per_node
    if size < 2:
        for line, text in file:
            label = _LABELLED.match(text)
            if label is not None:
                raise file.bad(line, "label", label[1], "this label before each line is not understood: take it off")
        raise InputError(file.name, size, "at least 2 ranks are needed, each on a line `#  Rank 0 ... device ...`")
    missing = [rank for rank in range(max(seen) + 1) if rank not in seen]
    if missing:
        allowed = f"ranks 0 to {max(seen)} are needed: there is no line of rank {missing[0]}"
        raise InputError(f"{file.name}, ranks", f"{size} lines", allowed)
    whole = all(count == local for count in hosts.values())
    if size > cluster.devices or not (whole or (len(hosts) == 1 and size <= local)):
        allowed = (
            f"{cluster.name} has {cluster.nodes} nodes of {local}; ranks must be on one, or fill those they are on"
        )
        raise InputError(f"{file.name}, ranks by host", dict(hosts), allowed)
    return size


def _columns(file: LogFile, line: int, text: str) -> list[str]:
    """The names of the columns. Raises InputError unless the out-of-place ones are there, in their order."""
    found = text.lstrip("# ").split()
    at = found.index("time") if "time" in found else len(found)
    if found[at + 1 : at + 3] != ["algbw", "busbw"] or len(found) < at + 4:
        raise file.bad(line, "columns", " ".join(found), "must have time, algbw, busbw and what was wrong")
    return found


def _reading(
    file: LogFile, line: int, columns: list[str], csv_row: list[str], sweep: _Sweep
) -> CollectiveReading | None:
    """One row; None for a size of no bytes, which is what small sizes are to an operation that divides them."""
    at = columns.index("time")
    if len(csv_row) < at + 4:
        raise file.bad(line, "row", " ".join(csv_row), "must have size, time, algbw, busbw and what was wrong")
    if csv_row[0] == "0":
        return None
    size_bytes = file.count(line, "size", csv_row[0])
    time_s = file.positive(line, "time", csv_row[at]) * 1e-6
    algbw = size_bytes / time_s
    _agree(file, line, "algbw", csv_row[at + 1], algbw)
    _agree(file, line, "busbw", csv_row[at + 2], algbw * ring_traffic(sweep.op, sweep.group_size))
    if columns[at + 3] == "#wrong" and csv_row[at + 3] not in {"0", "N/A"}:
        raise file.bad(line, "#wrong", csv_row[at + 3], "must be 0: the data did not arrive")
    return CollectiveReading(
        op=sweep.op,
        group_size=sweep.group_size,
        stride=1,
        size_bytes=size_bytes,
        iterations=sweep.iterations,
        time_s=time_s,
        time_p10_s=time_s,
        time_p90_s=time_s,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=algbw * ring_traffic(sweep.op, sweep.group_size),
    )


def _agree(file: LogFile, line: int, name: str, text: str, bytes_per_s: float) -> None:
    """A rate must be what size and time make it, else one of the three is in another unit or of another test."""
    try:
        stated = float(text)
    except ValueError:
        raise file.bad(line, name, text, "must be a number") from None
    expected = bytes_per_s / 1e9
    if not abs(stated - expected) <= max(AGREES * expected, ROUNDING):
        raise file.bad(line, name, text, f"size and time make {expected:.2f} GB/s")
