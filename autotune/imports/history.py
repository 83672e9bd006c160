"""Own history: a runs file (docs/backtest.md) as imported runs, and the network readings in its rows."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.backtest.csv_rows import short_lines
from autotune.backtest.groups import median_readings
from autotune.backtest.runs import Clusters, Run, RunStatus, Skipped, each_run
from autotune.cost.framework import framework_of
from autotune.errors import InputError
from autotune.imports.assembly import COMPARED
from autotune.specs import Failure, FailureKind, ModelSpec
from autotune.specs.imported import ImportedReading, ImportedRun

MAX_NOTES = 1000
MAX_WIRED = 50_000
"""Groups with readings of the network: those are in memory together, rows are not."""


@dataclass(frozen=True, slots=True)
class RunsFile:
    """The runs of a runs file, read from it again whenever they are gone through: none stays in memory.

    Raises:
        InputError: at the end, where the file is not what it was when it was made out to be good.
    """

    path: Path
    clusters: Clusters
    model: ModelSpec | None
    skip_bad: bool
    state: tuple[int, int, int]

    def __iter__(self) -> Iterator[ImportedRun]:
        """One run a row."""
        for each in each_run(self.path, self.clusters, skip_bad=self.skip_bad, most=math.inf):
            if isinstance(each, Run):
                yield _imported(each, self.model)
        if _state(self.path) != self.state:
            raise InputError("file", str(self.path), "a file that nobody changes while it is read")


class _Wires:
    """The bandwidths that the rows of a group state."""

    def __init__(self, first: Run) -> None:
        self.where, self.cluster = first.where, first.cluster
        self.one_node, self.all_ranks = array("d"), array("d")

    def add(self, run: Run) -> None:
        for kept, value in (
            (self.one_node, run.one_node_busbw_bytes_per_s),
            (self.all_ranks, run.all_ranks_busbw_bytes_per_s),
        ):
            if value is not None:
                kept.append(value)


def read(
    path: Path, clusters: Clusters, *, model: ModelSpec | None = None, skip_bad: bool = False
) -> tuple[RunsFile, int, list[ImportedReading], list[str]]:
    """Runs and their number, readings, and notes on what was left out. Every row is looked at, and none kept.

    Args:
        path: the CSV file.
        clusters: makes a cluster of what a row says of it.
        model: what all rows must be of; None takes each row's dimensions.
        skip_bad: leave bad rows out; without it the first one refuses the whole file.

    Raises:
        InputError: a bad row and column; a last row that was cut off; too many groups with readings of the network.
    """
    _require_whole(path)
    count, left_out, notes = 0, 0, []
    wires: dict[tuple[str, str], _Wires] = {}
    state = _state(path)
    for each in each_run(path, clusters, skip_bad=skip_bad, most=math.inf):
        if isinstance(each, Skipped):
            left_out += 1
            if left_out <= MAX_NOTES:
                notes.append(f"left out: {each.reason}")
            continue
        _imported(each, model)
        count += 1
        if each.one_node_busbw_bytes_per_s is not None or each.all_ranks_busbw_bytes_per_s is not None:
            wires.setdefault((each.group, each.cluster.key), _Wires(each)).add(each)
            if len(wires) > MAX_WIRED:
                raise InputError(str(path), "more groups", f"at most {MAX_WIRED:,} with readings of the network")
    if left_out > MAX_NOTES:
        notes.append(f"left out: {left_out - MAX_NOTES:,} more")
    readings = [
        ImportedReading(where=group.where, cluster=group.cluster, reading=reading)
        for group in wires.values()
        for reading in median_readings(group.cluster, group.one_node, group.all_ranks)
    ]
    return RunsFile(path, clusters, model, skip_bad, state), count, readings, notes


def _state(path: Path) -> tuple[int, int, int]:
    """What changes with a file."""
    try:
        found = path.stat()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError("file", str(path), f"a readable file is needed ({reason})") from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _require_whole(path: Path) -> None:
    """Refuses a file whose last row has no end and fewer cells than the others: half of it is missing."""
    header, last, number = "", "", 0
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            for line in short_lines(path, file):
                header, last, number = header or line, line, number + 1
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError("file", str(path), f"a readable file is needed ({reason})") from None
    if number < 2 or last.endswith(("\n", "\r")):
        return
    wanted, found = next(csv.reader([header])), next(csv.reader([last]), [])
    if len(found) < len(wanted):
        allowed = f"the last row is cut off ({len(found)} of {len(wanted)} cells); nothing of this file is imported"
        raise InputError(f"{path}, row {number}", last, allowed)


def _imported(run: Run, model: ModelSpec | None) -> ImportedRun:
    """The row as a run of `model`, whose shape it must have, or of its own where there is none."""
    model = model or run.model
    for name in COMPARED:
        found, wanted = getattr(run.model, name), getattr(model, name)
        if found != wanted:
            allowed = f"the row is of {run.model.name}; {model.name} has {name}={wanted}"
            raise InputError(f"{run.where}, column {name}", found, allowed)
    speed = run.tokens_per_s_per_gpu
    kind = FailureKind.OOM if run.status is RunStatus.OOM else FailureKind.CRASH
    return ImportedRun(
        where=run.where,
        framework=framework_of(run.source).name,
        group=run.group,
        model=model,
        cluster=run.cluster,
        workload=run.workload,
        plan=run.plan,
        tokens_per_s_per_gpu=speed,
        peak_reserved_bytes=round(run.reserved_bytes) if run.reserved_bytes else None,
        peak_allocated_bytes=round(run.allocated_bytes) if run.allocated_bytes else None,
        failure=None if speed is not None else Failure(kind=kind, message=f"status {run.status.value}"),
    )
