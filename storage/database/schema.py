"""The schema's version: which ones this release knows, and how a database gets to the newest."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from autotune.errors import StoreError, StoreNewerError, StoreOlderError, StoreReadOnlyError
from storage.database.engine import Location, clone, use_wal, writer

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parents[1] / "migrations"
# Oldest first, by the names of their files. The first, the baseline, makes all tables.
REVISIONS = tuple(sorted(path.name[1:5] for path in (MIGRATIONS / "versions").glob("v*.py")))
HEAD = REVISIONS[-1]
LAST_WITH_OLDER = "99024a8"
"""The last commit that migrates what the baseline replaced."""
VERSION_TABLE = "autotune_schema"  # `alembic_version` may be another program's
ADVISORY_LOCK = 0x6175746F  # "auto": one migration at a time on a PostgreSQL server


def stored_revision(connection: Connection) -> str | None:
    """The schema version of a database; None if it has none of our tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return revision


def require_known(revision: str | None, location: Location) -> None:
    """Raises StoreNewerError or StoreOlderError for a version that this release does not know."""
    if revision is None or revision in REVISIONS:
        return
    if revision < REVISIONS[0]:
        raise StoreOlderError(
            f"{location.name} has schema version {revision!r}, of before the first release; this one reads from "
            f"{REVISIONS[0]!r} on: run `autotune db migrate` of commit {LAST_WITH_OLDER}, or use another database"
        )
    raise StoreNewerError(
        f"{location.name} has schema version {revision!r}, written by a newer release; "
        f"this one knows up to {HEAD!r}: upgrade autotune or use another database"
    )


def require_current(engine: Engine, location: Location) -> None:
    """What a store that only reads needs: exactly our version. Writes nothing.

    Raises:
        StoreNewerError, StoreOlderError: this release does not know the schema.
        StoreError: the schema is older, or there is none.
    """
    with engine.connect() as connection:
        revision = stored_revision(connection)
    require_known(revision, location)
    if revision is None:
        raise StoreError(f"{location.name} holds nothing of autotune yet")
    if revision != HEAD:
        raise StoreError(f"{location.name} has the older schema {revision!r}: run `autotune db migrate`")


def make_ready(engine: Engine, location: Location) -> None:
    """What a store that writes needs: our version. Makes the tables of a new database.

    The SQLite file of an older release is migrated, and a copy of it is left beside it. An older PostgreSQL database is
    refused: processes of that release may be at work in it.

    Raises:
        StoreError: a PostgreSQL database of an older schema.
        StoreNewerError, StoreOlderError, StoreReadOnlyError: see `bring_up_to_date`.
    """
    with engine.connect() as connection:
        revision = stored_revision(connection)
    require_known(revision, location)
    if location.path is None and revision not in {None, HEAD}:
        raise StoreError(
            f"{location.name} has the older schema {revision!r}, and others may be using it: stop them, back it up, "
            "then run `autotune db migrate`"
        )
    bring_up_to_date(engine, location, keep_copy=True)


def bring_up_to_date(engine: Engine, location: Location, target: str = HEAD, *, keep_copy: bool = False) -> str | None:
    """Migrates a new or older database, all or nothing; returns the version that was found.

    With `keep_copy` a SQLite file of an older schema is copied before, into its own folder.

    Two processes may call it at once: the second waits (SQLite: the write lock that IMMEDIATE takes; PostgreSQL:
    an advisory lock) and then finds nothing to do. The write lock also proves that the database can be written.

    Raises:
        StoreNewerError, StoreOlderError: this release does not know the schema.
        StoreReadOnlyError: the database cannot be written.
    """
    with engine.connect() as connection:
        require_known(stored_revision(connection), location)
    if location.path is not None:
        use_wal(engine)
    with writer(engine).begin() as connection:
        return upgrade_within(connection, location, target, keep_copy=keep_copy)


def upgrade_within(
    connection: Connection, location: Location, target: str = HEAD, *, keep_copy: bool = False
) -> str | None:
    """Migrates within the caller's writing transaction; returns the version that was found. Raises as above."""
    _lock(connection, location)
    revision = stored_revision(connection)
    require_known(revision, location)
    if keep_copy and location.path is not None and revision not in {None, target}:
        _copy_beside(location.path, str(revision), target)
    if revision != target:
        _upgrade(connection, target)
    return revision


def _copy_beside(database: Path, revision: str, target: str) -> None:
    """Copies the file as it is before the caller's transaction, whose lock lets nobody else write."""
    copy = database.with_name(f"{database.name}.{revision}-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    copy.touch(mode=0o600)  # it holds what the database does
    try:
        clone(database, copy)
    except BaseException:
        copy.unlink()
        raise
    log.warning("%s gets this release's schema, %s; as it was with %s: %s", database, target, revision, copy)


def _lock(connection: Connection, location: Location) -> None:
    if connection.dialect.name != "postgresql":
        return
    if connection.execute(text("SHOW transaction_read_only")).scalar() == "on":
        raise StoreReadOnlyError(f"{location.name} cannot be written: the server allows only reading")
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})


def _upgrade(connection: Connection, target: str) -> None:
    # Alembic takes longer to import than most commands run, and is needed once in a database's life.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, target)
