"""How much there is of what, for whoever watches a fleet."""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.ports.fleet import FleetCounts
from storage.database.session import SessionStore
from storage.fleet.tables import JobRow, LeaseRow, NodeRow
from storage.tunings.tables import TuningRow


class CountStore(SessionStore):
    """Counts of the whole database."""

    def counts(self) -> FleetCounts:
        """What a monitor watches. Counted by the database: nothing is read row by row."""
        with self.reading() as session:
            return FleetCounts(
                tunings=_by_state(session, TuningRow.state),
                jobs=_by_state(session, JobRow.state),
                nodes=_by_state(session, NodeRow.state, NodeRow.forgotten_at.is_(None)),
                leases=session.scalar(select(func.count()).select_from(LeaseRow)) or 0,
                gpu_s=float(session.scalar(select(func.sum(TuningRow.gpu_s_spent))) or 0.0),
            )


def _by_state(session: Session, state: InstrumentedAttribute[str], *counted: ColumnElement[bool]) -> dict[str, int]:
    return dict(session.execute(select(state, func.count()).where(*counted).group_by(state)).all())
