"""SqlStore, the Store and FleetStore of autotune.tuning over SQLite or PostgreSQL, and the way to open one."""

from __future__ import annotations

from datetime import datetime

from storage.database.engine import build_engine, locate, translated
from storage.database.schema import bring_up_to_date, require_current
from storage.database.session import database_now
from storage.fleet.counts import CountStore
from storage.fleet.endings import EndingStore
from storage.fleet.events import EventStore
from storage.fleet.jobs import JobStore
from storage.fleet.keys import KeyStore
from storage.fleet.leases import ExpiryStore, LeaseStore
from storage.fleet.nodes import NodeStore
from storage.fleet.submissions import SubmissionStore
from storage.imports import ImportStore
from storage.knowledge import KnowledgeStore
from storage.regression.checks import CheckStore
from storage.regression.incidents import IncidentStore
from storage.tunings.measurements import MeasurementStore, PageStore
from storage.tunings.named import NamedStore
from storage.tunings.tunings import TuningStore

# ----------------------------------------------------------------------------------------------------
# The part of a store that makes it a FleetStore (autotune.ports.fleet).


class FleetTablesStore(
    NodeStore,
    JobStore,
    LeaseStore,
    ExpiryStore,
    EndingStore,
    SubmissionStore,
    EventStore,
    KeyStore,
    PageStore,
    CountStore,
):
    """Nodes, jobs, leases, requests, events, keys, and how many there are."""

    def now(self) -> datetime:
        """The database's clock, UTC."""
        with self.asking() as session:
            return database_now(session)


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
