"""`autotune export`: what was measured, as CSV or Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options, output


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
    if as_json:
        output.print_json({"table": table, "format": format, "path": str(path), "size_bytes": path.stat().st_size})
    else:
        output.console().print(f"{path} ({output.bytes_text(path.stat().st_size)})")
