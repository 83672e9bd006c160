"""SqlStore, the Store and FleetStore of autotune.ports over SQLite or PostgreSQL, and the way to open one."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.ports.fleet import FleetCounts
from storage.database.engine import build_engine, locate, translated
from storage.database.schema import make_ready, require_current
from storage.database.session import database_now
from storage.fleet.events import EventStore
from storage.fleet.jobs import JobStore
from storage.fleet.keys import KeyStore
from storage.fleet.leases import LeaseStore
from storage.fleet.nodes import NodeStore
from storage.fleet.submissions import SubmissionStore
from storage.fleet.tables import JobRow, LeaseRow, NodeRow, of_pool
from storage.fleet.turns import TurnStore
from storage.imports import ImportStore
from storage.knowledge import KnowledgeStore
from storage.regression.checks import CheckStore
from storage.regression.incidents import IncidentStore
from storage.tunings.measurements import MeasurementStore
from storage.tunings.named import NamedStore
from storage.tunings.tables import TuningRow
from storage.tunings.tunings import TuningStore


class SqlStore(
    NamedStore,
    TuningStore,
    MeasurementStore,
    ImportStore,
    KnowledgeStore,
    CheckStore,
    IncidentStore,
    NodeStore,
    JobStore,
    LeaseStore,
    SubmissionStore,
    TurnStore,
    EventStore,
    KeyStore,
):
    """Keeps everything in one database. Get one from `open_store`."""

    def now(self) -> datetime:
        """The database's clock, UTC."""
        with self.asking() as session:
            return database_now(session)

    def counts(self) -> FleetCounts:
        """What a monitor watches. Counted by the database: nothing is read row by row."""
        leases = select(func.count()).select_from(LeaseRow).join(NodeRow)
        with self.reading() as session:
            return FleetCounts(
                tunings=_by_state(session, TuningRow.state),
                jobs=_by_state(session, JobRow.state, of_pool(JobRow.pool)),
                nodes=_by_state(session, NodeRow.state, NodeRow.forgotten_at.is_(None), of_pool(NodeRow.pool)),
                leases=session.scalar(leases.where(of_pool(NodeRow.pool))) or 0,
                gpu_s=float(session.scalar(select(func.sum(TuningRow.gpu_s_spent))) or 0.0),
            )


def open_store(url: str, *, read_only: bool = False) -> SqlStore:
    """Opens the database; unless `read_only`, creates its tables, and migrates those of a SQLite file.

    Args:
        url: `sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`.
        read_only: write nothing, not even a migration; needs a database of this release's schema.

    Raises:
        StoreNewerError: a newer release wrote the schema.
        StoreReadOnlyError: it cannot be written (and `read_only` was not given).
        StoreError: no such database, server or driver, or not a database; or PostgreSQL with an older schema, which
            only storage.care.maintenance.migrate changes.
    """
    location = locate(url)
    with translated(location):
        engine = build_engine(location, read_only=read_only)
        try:
            if read_only:
                require_current(engine, location)
            else:
                make_ready(engine, location)
        except BaseException:
            engine.dispose()
            raise
    return SqlStore(engine, location, read_only=read_only)


def _by_state(session: Session, state: InstrumentedAttribute[str], *counted: ColumnElement[bool]) -> dict[str, int]:
    return dict(session.execute(select(state, func.count()).where(*counted).group_by(state)).all())
