"""`autotune import`, `imports` and `export`: what was measured elsewhere, kept by its source; our own as files."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.errors import InputError, StoreConflictError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.imports import Format, Imported, Stated
    from autotune.specs.imported import ImportBatch, ImportedRun
    from storage import SqlStore

_UNSTATED = "What a log does not state itself"


def import_files(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Logs, or runs files as `export` writes them.")
    ],
    format: Annotated[str, typer.Option("--format", metavar="csv|nccl-tests|megatron|torchtitan|deepspeed|nanotron")],
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="NAME", help="Whose measurements these are. Default: the name of the one file."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="What was trained.", rich_help_panel=_UNSTATED)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="CLUSTER", help="Where it ran. Logs need it.", rich_help_panel=_UNSTATED),
    ] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, rich_help_panel=_UNSTATED)] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, rich_help_panel=_UNSTATED)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", rich_help_panel=_UNSTATED)] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="PLAN", help="tp=8,pp=4,micro_batch=1,...", rich_help_panel=_UNSTATED),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="csv: leave bad rows out, and name them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and show everything, store nothing.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Import measurements of others: runs files, nccl-tests and training logs.

    They are kept under their source and used only where it is named: --history SOURCE of `tune` and `plan`. The same
    content is stored once, whatever its name; docs/import.md describes what each format must state.
    """
    from autotune.imports import batch_of, read_content

    kind = _format(format)
    name = _source(source, files)
    stated = None
    if kind.value != "csv":
        stated = _stated(model, cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, plan=plan, db=db)
    else:
        _refuse_unused(seq_len=seq_len, global_batch=global_batch, dtype=dtype, plan=plan)
    now, found = datetime.now(UTC), []
    for path in files:  # everything is read before anything is stored
        content = read_content(path)
        read = (
            _table(path, model, cluster, db, skip_bad=skip_bad) if stated is None else _log(kind, path, content, stated)
        )
        found.append((batch_of(path, content, name, kind, now), content, read))
    with _store(db, dry_run=dry_run) as store:
        answers = [
            _keep(store, batch, content, read, dry_run=dry_run, named=source is not None)
            for batch, content, read in found
        ]
    told = {"source": name, "dry_run": dry_run, "files": answers}
    output.tell(told, lambda: _print_imported(name, answers, dry_run=dry_run), as_json=as_json)


def imports(
    forget: Annotated[
        str | None, typer.Option("--forget", metavar="SOURCE", help="Remove everything that was imported as SOURCE.")
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


def _format(name: str) -> Format:
    from autotune.imports import Format

    if name not in list(Format):
        raise InputError("--format", name, "one of " + ", ".join(Format))
    return Format(name)


def _source(source: str | None, files: Sequence[Path]) -> str:
    if source is None and len(files) > 1:
        raise InputError("--source", None, "several files need a name to be kept under")
    return source if source is not None else files[0].stem


def _refuse_unused(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError("--" + name.replace("_", "-"), value, "a runs file states this in each row")


def _stated(
    model: str | None,
    cluster: str | None,
    *,
    seq_len: int | None,
    global_batch: int | None,
    dtype: str | None,
    plan: str | None,
    db: str | None,
) -> Stated:
    from autotune.cli.inputs import read_cluster, read_model
    from autotune.imports import Stated

    if cluster is None:
        raise InputError("--cluster", None, "a log does not describe its hardware: name the cluster it ran on")
    workload = {"seq_len": seq_len, "global_batch": global_batch, "dtype": dtype}
    return Stated(
        cluster=read_cluster(cluster, db),
        model=None if model is None else read_model(model, db),
        workload={name: value for name, value in workload.items() if value is not None},
        plan={} if plan is None else _plan(plan),
    )


def _plan(text: str) -> dict[str, Any]:
    """Only what the text gives: what it leaves out is not a default here but unknown."""
    from autotune.specs import Plan

    given = {piece.partition("=")[0].strip() for piece in text.split(",")}
    given |= {"schedule"} if "vpp" in given else set()
    return {name: value for name, value in Plan.parse(text).to_data().items() if name in given}


def _table(path: Path, model: str | None, cluster: str | None, db: str | None, *, skip_bad: bool) -> Imported:
    from autotune.cli.backtest import clusters_of
    from autotune.cli.inputs import read_model
    from autotune.imports import read_table

    wanted = None if model is None else read_model(model, db)
    return read_table(path, clusters_of(cluster, db), model=wanted, skip_bad=skip_bad)


def _log(kind: Format, path: Path, content: bytes, stated: Stated) -> Imported:
    from autotune.imports import read_log

    return read_log(kind, str(path), content.decode("utf-8", errors="replace"), stated)


def _store(db: str | None, *, dry_run: bool) -> Any:
    from autotune.cli.database import is_there, open_to_read, open_to_write

    if not dry_run:
        return open_to_write(db)
    return open_to_read(db) if is_there(db) else nullcontext()


def _require_same(store: SqlStore, twin: ImportBatch, batch: ImportBatch, read: Imported, *, named: bool) -> None:
    """Refuses content that is stored already under another source or read with other options: it would not change."""
    anew = f"`autotune imports --forget {twin.source}` makes room to read it again"
    if named and twin.source != batch.source:
        raise InputError("--source", batch.source, f"{batch.file_name} is stored as {twin.source}; {anew}")
    kept = [run.model_copy(update={"where": ""}) for run in store.imported_runs(twin.source)]
    if any(run.model_copy(update={"where": ""}) not in kept for run in read.runs):
        raise InputError(batch.file_name, "other options", f"it is stored as it was read before; {anew}")


def _keep(
    store: SqlStore | None, batch: ImportBatch, content: bytes, read: Imported, *, dry_run: bool, named: bool
) -> dict[str, Any]:
    """Stores one file, unless its content is there already; tells what was done with it."""
    from autotune.imports import beginnings

    known = () if store is None else store.imports()
    twin = next((item for item in known if item.sha256 == batch.sha256), None)
    outdated = beginnings(content, [item for item in known if item.source == batch.source])
    if store is not None and twin is None and not dry_run:
        try:
            store.save_import(batch, read.runs, read.readings, replaces=[item.sha256 for item in outdated])
        except StoreConflictError:  # another process, or this command's other file, was first
            twin = next(item for item in store.imports() if item.sha256 == batch.sha256)
    if store is not None and twin is not None:
        _require_same(store, twin, batch, read, named=named)
    return {
        "file": batch.file_name,
        "sha256": batch.sha256,
        "stored": twin is None and not dry_run,
        "already": None if twin is None else twin.to_data(),
        "replaces": [] if twin else [item.file_name for item in outdated],
        "runs": [_run_data(run) for run in read.runs],
        "readings": [{"where": item.where, **item.reading.to_data()} for item in read.readings],
        "notes": list(read.notes),
    }


def _run_data(run: ImportedRun) -> dict[str, Any]:
    """A run as --json shows it: model and cluster by name, the kind of a failure."""
    data = {name: value for name, value in run.to_data().items() if name not in {"framework", "group"}}
    failure = None if run.failure is None else run.failure.kind.value
    return {**data, "model": run.model.name, "cluster": run.cluster.name, "failure": failure}


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


def export(
    table: Annotated[
        str,
        typer.Option(
            "--table",
            help="trials, tunings, probes, collective, layer, step, ranks, profiles, or runs (for a backtest).",
        ),
    ] = "trials",
    format: Annotated[str, typer.Option("--format", metavar="csv|parquet", help="The file's format.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: TABLE.FORMAT.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
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
