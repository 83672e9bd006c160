"""`autotune import`, `imports` and `export`: what was measured elsewhere, kept by its source; our own as files."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.backtest import clusters_of
from autotune.cli.options import option
from autotune.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.imports import Stated
    from autotune.specs import ModelSpec

_UNSTATED = "What a log does not state itself"


def import_files(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Logs, or runs files as `export` writes them.")
    ],
    format: Annotated[str, option("--format", metavar="csv|nccl-tests|megatron|torchtitan|deepspeed|nanotron")],
    source: Annotated[
        str | None, option("--source", "NAME", "Whose measurements these are. Default: the name of the one file.")
    ] = None,
    model: Annotated[str | None, option("--model", "MODEL", "What was trained.", panel=_UNSTATED)] = None,
    cluster: Annotated[
        str | None, option("--cluster", "CLUSTER", "Where it ran. Logs need it.", panel=_UNSTATED)
    ] = None,
    seq_len: Annotated[int | None, option("--seq-len", min=1, panel=_UNSTATED)] = None,
    global_batch: Annotated[int | None, option("--global-batch", min=1, panel=_UNSTATED)] = None,
    dtype: Annotated[str | None, option("--dtype", metavar="DTYPE", panel=_UNSTATED)] = None,
    plan: Annotated[str | None, option("--plan", "PLAN", "tp=8,pp=4,micro_batch=1,...", panel=_UNSTATED)] = None,
    skip_bad: Annotated[bool, option("--skip-bad", help="csv: leave bad rows out, and name them.")] = False,
    dry_run: Annotated[bool, option("--dry-run", help="Read and show everything, store nothing.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Import measurements of others: runs files, nccl-tests and training logs.

    They are kept under their source and used only where it is named: --history SOURCE of `tune` and `plan`. The same
    content is stored once, whatever its name; docs/import.md describes what each format must state.
    """
    from autotune.cli.database import is_there, open_to_read, open_to_write
    from autotune.cli.inputs import read_model
    from autotune.imports import FileContent, Format, batch_of, read_log, read_table
    from autotune.imports.keeping import keep

    if format not in list(Format):
        raise InputError("--format", format, "one of " + ", ".join(Format))
    if source is None and len(files) > 1:
        raise InputError("--source", None, "several files need a name to be kept under")
    kind, name = Format(format), source if source is not None else files[0].stem
    workload = {"seq_len": seq_len, "global_batch": global_batch, "dtype": dtype}
    trained = None if model is None else read_model(model, db)
    if kind is Format.CSV:
        for option_name, value in {**workload, "plan": plan}.items():
            if value is not None:
                allowed = "a runs file states this in each row"
                raise InputError("--" + option_name.replace("_", "-"), value, allowed)
        find = clusters_of(cluster, db)
    else:
        stated = _stated(trained, cluster, workload, plan, db)
    now, found = datetime.now(UTC), []
    for path in files:  # everything is read before anything is stored
        content = FileContent.of(path)
        if kind is Format.CSV:
            read = read_table(path, find, model=trained, skip_bad=skip_bad)
        else:
            read = read_log(kind, str(path), content, stated)
        found.append((batch_of(content, name, kind, now), content, read))
    here = open_to_write(db) if not dry_run else open_to_read(db) if is_there(db) else nullcontext()
    with here as store:
        answers = [keep(store, *each, dry_run=dry_run, named=source is not None) for each in found]
    told = {"source": name, "dry_run": dry_run, "files": answers}
    output.tell(told, lambda: _print_imported(name, answers, dry_run=dry_run), as_json=as_json)


def imports(
    forget: Annotated[
        str | None, option("--forget", "SOURCE", "Remove everything that was imported as SOURCE.")
    ] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """List what was imported, or forget a source."""
    from autotune.cli.database import open_to_read, open_to_write

    if forget is not None:
        with open_to_write(db) as store:
            count = store.forget_import(forget)
        output.tell({"forgotten": forget, "files": count}, f"forgotten: {count} files of {forget}", as_json=as_json)
        return
    with open_to_read(db) as store:
        batches = [batch.to_data() for batch in store.imports()]
    output.tell_list(
        "imports", batches, ("<source", "source"), ("<file", "file_name"), ("<format", "format"),
        ("size", "size_bytes"), ("<imported", "imported_at"),
        empty="Nothing was imported yet: autotune import", as_json=as_json,
    )  # fmt: skip


def _stated(
    model: ModelSpec | None, cluster: str | None, workload: dict[str, Any], plan: str | None, db: str | None
) -> Stated:
    """What the options say of logs."""
    from autotune.cli.inputs import read_cluster
    from autotune.imports import Stated

    if cluster is None:
        raise InputError("--cluster", None, "a log does not describe its hardware: name the cluster it ran on")
    return Stated(
        cluster=read_cluster(cluster, db),
        model=model,
        workload={name: value for name, value in workload.items() if value is not None},
        plan={} if plan is None else _plan(plan),
    )


def _plan(text: str) -> dict[str, Any]:
    """Only what the text gives: what it leaves out is not a default here but unknown."""
    from autotune.specs import Plan

    given = {piece.partition("=")[0].strip() for piece in text.split(",")}
    given |= {"schedule"} if "vpp" in given else set()
    said = {name: value for name, value in Plan.parse(text).to_data().items() if name in given}
    return {name: "+".join(value) if isinstance(value, list) else value for name, value in said.items()}


def _print_imported(source: str, answers: Sequence[dict[str, Any]], *, dry_run: bool) -> None:
    """The runs of all files as a table, then a sentence a file."""
    console = output.console()
    runs = [run for answer in answers for run in answer["runs"]]
    table = output.listing(
        "", runs, ("<where", "where"), ("<model", "model"), ("<plan", "plan"),
        ("tokens/s/GPU", lambda run: run["failure"] or output.count_text(run["tokens_per_s_per_gpu"])),
        ("95 % interval", "interval_tokens_per_s_per_gpu"), ("steps", "steps"),
        ("peak reserved", "peak_reserved_bytes"),
    )  # fmt: skip
    if runs:
        console.print(table)
    if (untold := sum(answer["run_count"] for answer in answers) - len(runs)) > 0:
        console.print(f"and {untold:,} more runs")
    for answer in answers:
        for note in answer["notes"]:
            console.print(f"note: {note}", soft_wrap=True)
        console.print(_sentence(source, answer, dry_run=dry_run), soft_wrap=True)


def _sentence(source: str, answer: dict[str, Any], *, dry_run: bool) -> str:
    what = f"{answer['file']}: {answer['run_count']:,} runs and {len(answer['readings'])} collective readings"
    if answer["already"]:
        known = answer["already"]
        return (
            f"{what}: imported already as {known['source']} ({known['file_name']}); nothing was changed, whatever was "
            f"said of it this time: autotune imports --forget {known['source']} first"
        )
    replaced = f", in place of {', '.join(answer['replaces'])}" if answer["replaces"] else ""
    return f"{what} {'would be ' if dry_run else ''}imported as {source}{replaced}"


def export(
    table: Annotated[
        str,
        option(
            "--table",
            help="trials, tunings, probes, collective, layer, step, ranks, profiles, or runs (for a backtest).",
        ),
    ] = "trials",
    format: Annotated[str, option("--format", "csv|parquet", "The file's format.")] = "csv",
    out: Annotated[Path | None, option("--out", "FILE", "Default: TABLE.FORMAT.")] = None,
    overwrite: Annotated[bool, option("--overwrite", help="Replace the file if it exists.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write one table to a file; moments in UTC, seconds and bytes as numbers."""
    from autotune.cli.database import open_to_read
    from storage import frames

    with open_to_read(db) as store:
        path = frames.export(store, table, format, out or Path(f"{table}.{format}"), overwrite=overwrite)
    size = path.stat().st_size
    told = {"table": table, "format": format, "path": str(path), "size_bytes": size}
    output.tell(told, f"{path} ({output.bytes_text(size)})", as_json=as_json)
