"""Own history: a runs file (docs/backtest.md) as imported runs, and the network readings in its rows."""

from __future__ import annotations

import csv
from pathlib import Path

from autotune.backtest.csv_rows import short_lines
from autotune.backtest.groups import network_readings
from autotune.backtest.runs import Clusters, Run, RunStatus, read_runs
from autotune.cost.framework import framework_of
from autotune.errors import InputError
from autotune.imports.assembly import COMPARED
from autotune.specs import Failure, FailureKind, ModelSpec
from autotune.specs.imported import ImportedReading, ImportedRun


def read(
    path: Path, clusters: Clusters, *, model: ModelSpec | None = None, skip_bad: bool = False
) -> tuple[list[ImportedRun], list[ImportedReading], list[str]]:
    """Runs, readings and notes on what was left out.

    Args:
        path: the CSV file.
        clusters: makes a cluster of what a row says of it.
        model: what all rows must be of; None takes each row's dimensions.
        skip_bad: leave bad rows out; without it the first one refuses the whole file.

    Raises:
        InputError: a bad row and column; a last row that was cut off.
    """
    _require_whole(path)
    rows, skipped = read_runs(path, clusters, skip_bad=skip_bad)
    runs = [_imported(row, model) for row in rows]
    by_group: dict[tuple[str, str], list[Run]] = {}
    for row in rows:
        by_group.setdefault((row.group, row.cluster.key), []).append(row)
    readings = [
        ImportedReading(where=group[0].where, cluster=group[0].cluster, reading=reading)
        for group in by_group.values()
        for reading in network_readings(group)
    ]
    return runs, readings, [f"left out: {item.reason}" for item in skipped]


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
