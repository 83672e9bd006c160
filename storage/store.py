"""SqlStore, the Store and FleetStore of autotune.tuning over SQLite or PostgreSQL, and the way to open one."""

from __future__ import annotations

import storage.summary_tables  # noqa: F401  (its tables belong to the schema)
from storage.engine import build_engine, locate
from storage.faults import translated
from storage.fleet import FleetTablesStore
from storage.imports import ImportStore
from storage.incidents import IncidentStore
from storage.knowledge import KnowledgeStore
from storage.measurements import MeasurementStore
from storage.named import NamedStore
from storage.regression import CheckStore
from storage.schema import bring_up_to_date, require_current
from storage.tunings import TuningStore


class SqlStore(
    NamedStore,
    TuningStore,
    MeasurementStore,
    ImportStore,
    KnowledgeStore,
    CheckStore,
    IncidentStore,
    FleetTablesStore,
):
    """Keeps everything in one database. Get one from `open_store`."""


def open_store(url: str, *, read_only: bool = False) -> SqlStore:
    """Opens the database, creating or migrating its tables unless `read_only`.

    Args:
        url: `sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`.
        read_only: write nothing, not even a migration; needs a database of this release's schema.

    Raises:
        StoreNewerError: a newer release wrote the schema.
        StoreReadOnlyError: it cannot be written (and `read_only` was not given).
        StoreError: no such database, server or driver, or not a database.
    """
    location = locate(url)
    with translated(location):
        engine = build_engine(location, read_only=read_only)
        try:
            if read_only:
                require_current(engine, location)
            else:
                bring_up_to_date(engine, location)
        except BaseException:
            engine.dispose()
            raise
    return SqlStore(engine, location, read_only=read_only)
