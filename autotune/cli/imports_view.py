"""What `autotune import` tells of each file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.specs.imported import ImportedRun


def run_data(run: ImportedRun) -> dict[str, Any]:
    """A run as --json shows it."""
    return {
        "where": run.where,
        "model": run.model.name,
        "cluster": run.cluster.name,
        "workload": run.workload.to_data(),
        "plan": run.plan.to_data(),
        "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
        "interval_tokens_per_s_per_gpu": run.interval_tokens_per_s_per_gpu,
        "steps": run.steps,
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "failure": None if run.failure is None else run.failure.kind.value,
    }


def print_imported(source: str, answers: Sequence[dict[str, Any]], *, dry_run: bool) -> None:
    """The runs of all files as a table, then a sentence a file."""
    console = output.console()
    table = output.table("", "<where", "<model", "<plan", "tokens/s/GPU", "95 % interval", "steps", "peak reserved")
    for run in (run for answer in answers for run in answer["runs"]):
        interval = run["interval_tokens_per_s_per_gpu"]
        table.add_row(
            run["where"],
            run["model"],
            output.plan_text(run["plan"]),
            run["failure"] or output.count_text(run["tokens_per_s_per_gpu"]),
            "-" if interval is None else " - ".join(output.count_text(value) for value in interval),
            str(run["steps"]),
            output.bytes_text(run["peak_reserved_bytes"]),
        )
    if table.row_count:
        console.print(table)
    for answer in answers:
        for note in answer["notes"]:
            console.print(f"note: {note}", soft_wrap=True)
        console.print(_sentence(source, answer, dry_run=dry_run), soft_wrap=True)


def _sentence(source: str, answer: dict[str, Any], *, dry_run: bool) -> str:
    what = f"{answer['file']}: {len(answer['runs'])} runs and {len(answer['readings'])} collective readings"
    if answer["already"]:
        known = answer["already"]
        return (
            f"{what}: imported already as {known['source']} ({known['file_name']}); nothing was changed, whatever was "
            f"said of it this time: autotune imports --forget {known['source']} first"
        )
    replaced = f", in place of {', '.join(answer['replaces'])}" if answer["replaces"] else ""
    return f"{what} {'would be ' if dry_run else ''}imported as {source}{replaced}"
