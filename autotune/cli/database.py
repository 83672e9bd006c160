"""`autotune db`, and how the other commands find and open the database."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output
from autotune.cli.options import option
from autotune.errors import StoreError
from autotune.settings import database_file, read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.specs import ClusterSpec, ModelSpec, Profile
    from storage import SqlStore
    from storage.care.backup import Copy

app = typer.Typer(help="The database: migrate, grant, check, count, back up, restore, compact.", no_args_is_help=True)


def database_url(db: str | None) -> str:
    """The URL that --db names, else that of the settings."""
    return db or read_settings().database_url


def open_to_read(db: str | None) -> closing[SqlStore]:
    """The store as it is, closed at the end of a `with`; nothing is created. Raises StoreError if there is none."""
    from autotune.wiring import open_store

    if not is_there(db):
        url = database_url(db)
        raise StoreError(f"there is no database yet ({url}): autotune tune makes one, or autotune db migrate")
    return closing(open_store(db, read_only=True))


def open_to_write(db: str | None) -> closing[SqlStore]:
    """The store, made or brought up to date if need be; closed at the end of a `with`."""
    from autotune.wiring import open_store

    return closing(open_store(db))


def open_to_change(db: str | None) -> closing[SqlStore]:
    """The store, for what makes no sense in a new one. Raises StoreError where its file is not there yet."""
    url = database_url(db)
    file = database_file(url)
    if file is not None and not os.path.exists(file):
        raise StoreError(f"there is no database yet ({url}): autotune db migrate makes one")
    return open_to_write(db)


def stored_models(db: str | None) -> Sequence[ModelSpec]:
    """All stored models; none without a database."""
    if not is_there(db):
        return ()
    with open_to_read(db) as store:
        return store.models()


def stored_clusters(db: str | None) -> Sequence[ClusterSpec]:
    """All stored clusters; none without a database."""
    if not is_there(db):
        return ()
    with open_to_read(db) as store:
        return store.clusters()


def stored_profile(cluster: ClusterSpec, db: str | None) -> Profile | None:
    """The newest profile of the cluster; None if it was never measured, or without a database."""
    if not is_there(db):
        return None
    with open_to_read(db) as store:
        return store.profile(cluster.key)


def is_there(db: str | None) -> bool:
    """Whether there is a database to ask: one that was named must be, the default SQLite file may not be yet."""
    file = database_file(database_url(db))
    return bool(db) or file is None or os.path.exists(file)


@app.command()
def migrate(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """Create the database, or bring its schema up to date."""
    from autotune.wiring import make_folder
    from storage.care import maintenance

    make_folder(db)
    done = maintenance.migrate(database_url(db))
    changed = f"{done.database}: schema {done.found or 'none'} -> {done.now}"
    same = f"{done.database} is up to date (schema {done.now})"
    output.tell(asdict(done), same if done.found == done.now else changed, as_json=as_json)


@app.command()
def grant(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="A role of PostgreSQL that is there already.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Let a database role do what a node worker does, and nothing else. After each `migrate`, as the owner."""
    from storage.care.roles import grant_node

    done = grant_node(database_url(db), role)
    lines = [f"{done.database}: {done.role} may do what a node does"]
    lines += [f"  {table}: {rights}" for table, rights in done.rights.items()]
    output.tell(asdict(done), "\n".join(lines), as_json=as_json)


@app.command()
def check(db: options.Database = None, as_json: options.AsJson = False) -> int:
    """Read the whole database and look for damage. Exit status 5 if there is some."""
    from storage.care import maintenance

    found = maintenance.check(database_url(db))
    lines = found.problems or (f"{found.database} is sound (schema {found.schema})",)
    output.tell({**asdict(found), "sound": found.sound}, "\n".join(lines), as_json=as_json)
    return 0 if found.sound else StoreError.exit_code


@app.command()
def stats(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """Count the rows of each table."""
    from storage.care import maintenance

    found = maintenance.stats(database_url(db))
    told = f"{found.database}, schema {found.schema}, {output.bytes_text(found.size_bytes)}"
    output.tell(asdict(found), told, as_json=as_json)
    if not as_json:
        rows = [{"table": name, "rows": f"{count:,}"} for name, count in found.rows.items()]
        output.console().print(output.listing("", rows, ("<table", "table"), ("rows", "rows")))


@app.command()
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to write it: one file, whatever the database is.")
    ],
    overwrite: Annotated[bool, option("--overwrite", help="Replace the file if it exists.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a consistent copy of the whole database to a file. Others may go on using it."""
    from storage.care.backup import backup as write_backup

    done = write_backup(database_url(db), file, overwrite=overwrite)
    _print_copy(done, f"{done.database} -> {done.file}", as_json=as_json)


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A backup, of SQLite or PostgreSQL alike.")],
    overwrite: Annotated[
        bool, option("--overwrite", help="Replace what the database holds, also while others use it.")
    ] = False,
    keys: Annotated[
        bool,
        option("--keys", help="Take over API keys that the database does not know: were any revoked since, they work."),
    ] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Put a backup into a new or empty database: all of it, or nothing.

    API keys that the database has stay as they are. What is revoked there or in the backup is revoked.
    """
    from autotune.wiring import make_folder
    from storage.care.backup import restore as read_backup

    make_folder(db)
    done = read_backup(database_url(db), file, overwrite=overwrite, keys=keys)
    _print_copy(done, f"{done.file} -> {done.database}", as_json=as_json)
    unknown = (
        "other valid keys have their names"
        if keys
        else "this database cannot tell whether they were revoked since the backup was made. Make new ones with "
        "`autotune keys create`, or restore with --keys"
    )
    for what, found, why in (
        ("stay revoked", done.keys_revoked, "that was done since the backup was made"),
        ("were left out", done.keys_left_out, unknown),
    ):
        if found:
            named = ", ".join(f"{key} of {name}" for key, name in found)
            output.error_console().print(f"API keys that {what}: {named} ({why})", soft_wrap=True)


@app.command()
def compact(
    older_than: Annotated[
        int, option("--older-than", "DAYS", min=0, max=36_500, help="Age of what is compacted.")
    ] = 90,
    keep: Annotated[
        int, option("--keep", "N", min=1, max=10**9, help="Newest readings of each collective that stay as they are.")
    ] = 20,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn old raw samples into summaries and give the space back. Results and verdicts stay as they are."""
    from datetime import timedelta

    from storage.care.compaction import compact as compact_database

    done = compact_database(database_url(db), age=timedelta(days=older_than), kept=keep)
    output.tell(
        {**asdict(done), "before": done.before.isoformat()},
        f"{done.database}: what ended before {done.before:%Y-%m-%d %H:%M} UTC\n"
        f"{done.samples:,} single steps and {done.readings:,} collective readings are summaries now; "
        f"{done.logs:,} logs, {done.events:,} events, {done.reports:,} reports of ended jobs, what {done.ranks:,} "
        f"ranks saw, {done.incidents:,} incidents of nodes and {done.keys:,} idempotency keys are gone\n"
        f"{output.bytes_text(done.size_before_bytes)} -> {output.bytes_text(done.size_after_bytes)}",
        as_json=as_json,
    )


def _print_copy(done: Copy, sentence: str, *, as_json: bool) -> None:
    rows = sum(done.rows.values())
    output.tell(asdict(done), f"{sentence}: {rows:,} rows, schema {done.schema}", as_json=as_json)
