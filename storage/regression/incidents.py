"""Incidents: opened by worse checks, recovered by good ones, told through an outbox of alerts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from autotune.specs.regression import (
    Alert,
    AlertChannel,
    AlertEvent,
    CauseKind,
    CheckResult,
    Incident,
    VerdictKind,
)
from storage.database.session import RacedError, SessionStore, flush_new
from storage.regression.tables import AlertRow, CheckRow, IncidentRow, IncidentSeriesRow

SOUND = frozenset({VerdictKind.UNCHANGED, VerdictKind.BETTER})


class IncidentStore(SessionStore):
    """Incidents and alerts; see autotune.ports.regression."""

    def incidents_page(self, *, open_only: bool = False, limit: int = 50) -> Sequence[Incident]:
        """The newest incidents, newest first."""
        query = select(IncidentRow).order_by(IncidentRow.id.desc()).limit(limit)
        if open_only:
            query = query.where(IncidentRow.recovered_at.is_(None))
        with self.reading() as session:
            return [_incident_of(session, row) for row in session.scalars(query)]

    def due_alerts(self, now: datetime) -> Sequence[Alert]:
        """Alerts that were not sent and may be tried, oldest first."""
        query = (
            select(AlertRow, IncidentRow)
            .join(IncidentRow, IncidentRow.id == AlertRow.incident_id)
            .where(AlertRow.sent_at.is_(None), AlertRow.due_at <= now)
            .order_by(AlertRow.at, AlertRow.key)
        )
        with self.reading() as session:
            return [_alert_of(row, _incident_of(session, incident)) for row, incident in session.execute(query)]

    def claim_alert(self, key: str, now: datetime, lease: timedelta) -> bool:
        """Takes a due alert for that long; False if somebody has."""
        change = (
            update(AlertRow)
            .where(AlertRow.key == key, AlertRow.sent_at.is_(None), AlertRow.due_at <= now)
            .values(due_at=now + lease, attempts=AlertRow.attempts + 1)
        )
        with self.writing() as session:
            return bool(session.execute(change).rowcount)  # type: ignore[attr-defined]

    def note_alert(self, key: str, *, sent_at: datetime | None, due_at: datetime, error: str) -> None:
        """Writes how sending went."""
        change = update(AlertRow).where(AlertRow.key == key).values(sent_at=sent_at, due_at=due_at, error=error)
        with self.writing() as session:
            session.execute(change)


def note_incident(
    session: Session,
    check: CheckRow,
    result: CheckResult,
    key: str,
    channels: Collection[AlertChannel],
    now: datetime,
) -> None:
    """What an ended check means for incidents. Raises RacedError if another check opened the same one meanwhile."""
    mine = session.scalar(
        select(IncidentSeriesRow).where(
            IncidentSeriesRow.series == check.series, IncidentSeriesRow.recovered_at.is_(None)
        )
    )
    if result.verdict is VerdictKind.WORSE and mine is None:
        incident = _open(session, check, result, key, channels, now)
        session.add(IncidentSeriesRow(incident_id=incident.id, series=check.series, entry_id=check.entry_id))
        flush_new(session, f"series {check.series} is in an incident already", RacedError)
    elif result.verdict in SOUND and mine is not None:
        incident = _locked(session, mine.incident_id)
        mine.recovered_at = now
        session.flush()
        left = select(IncidentSeriesRow.id).where(
            IncidentSeriesRow.incident_id == incident.id, IncidentSeriesRow.recovered_at.is_(None)
        )
        if session.scalar(left.limit(1)) is None:
            incident.recovered_at = now
            _tell(session, incident, AlertEvent.RECOVERED, channels, now)


def _open(
    session: Session,
    check: CheckRow,
    result: CheckResult,
    key: str,
    channels: Collection[AlertChannel],
    now: datetime,
) -> IncidentRow:
    """The open incident of that key, locked; a new one where there is none."""
    query = select(IncidentRow).where(IncidentRow.key == key, IncidentRow.recovered_at.is_(None))
    found = session.scalar(query.with_for_update())
    if found is not None:
        return found
    cause = result.cause
    incident = IncidentRow(
        key=key,
        kind=(cause.kind if cause else CauseKind.CANNOT_TELL).value,
        subject=cause.subject if cause else "",
        message=f"{result.message}: {cause.text}" if cause else result.message,
        check_id=check.id,
        opened_at=now,
    )
    session.add(incident)
    flush_new(session, f"incident {key} is open already", RacedError)
    _tell(session, incident, AlertEvent.OPENED, channels, now)
    return incident


def _locked(session: Session, incident_id: int) -> IncidentRow:
    return session.scalars(select(IncidentRow).where(IncidentRow.id == incident_id).with_for_update()).one()


def _tell(
    session: Session, incident: IncidentRow, event: AlertEvent, channels: Collection[AlertChannel], now: datetime
) -> None:
    session.add_all(
        AlertRow(
            key=f"{incident.check_id}-{event}-{channel}",
            incident_id=incident.id,
            event=event.value,
            channel=channel.value,
            at=now,
            attempts=0,
            due_at=now,
            error="",
        )
        for channel in channels
    )


def _incident_of(session: Session, row: IncidentRow) -> Incident:
    series = session.scalars(
        select(IncidentSeriesRow).where(IncidentSeriesRow.incident_id == row.id).order_by(IncidentSeriesRow.id)
    ).all()
    return Incident(
        id=row.id,
        key=row.key,
        kind=CauseKind(row.kind),
        subject=row.subject,
        message=row.message,
        check_id=row.check_id,
        opened_at=row.opened_at,
        recovered_at=row.recovered_at,
        series=tuple(item.series for item in series if item.recovered_at is None),
        entries=tuple(dict.fromkeys(item.entry_id for item in series)),
    )


def _alert_of(row: AlertRow, incident: Incident) -> Alert:
    return Alert(
        key=row.key,
        incident=incident,
        event=AlertEvent(row.event),
        channel=AlertChannel(row.channel),
        at=row.at,
        attempts=row.attempts,
        due_at=row.due_at,
        sent_at=row.sent_at,
        error=row.error,
    )
