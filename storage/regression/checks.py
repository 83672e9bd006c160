"""Regression checks: candidates, checks under way and ended, their measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, aliased

from autotune.errors import UnknownNameError
from autotune.specs.knowledge import MEASURED
from autotune.specs.regression import (
    AlertChannel,
    Check,
    CheckCandidate,
    CheckMeasurement,
    CheckResult,
    CheckState,
    series_of_keys,
)
from storage.database.session import RacedError, SessionStore, again, database_now, flush_new
from storage.knowledge import BestRow
from storage.regression.incidents import note_incident
from storage.regression.tables import CheckMeasurementRow, CheckRow, IncidentSeriesRow
from storage.tunings.tables import TuningRow

PLAIN = (
    "id", "entry_id", "series", "cluster_key", "pool", "fingerprint_key", "environment_key", "owner", "budget_gpu_s",
    "gpu_s", "started_at", "ended_at", "tuning_id",
)  # fmt: skip
QUESTION = ("model_key", "cluster_key", "workload_key")


class CheckStore(SessionStore):
    """Checks of best-known entries; see autotune.ports.regression."""

    def check_candidates(self) -> Sequence[CheckCandidate]:
        """The current entries of our own measurements, the newest of each question, newest first."""
        tuned = (
            select(*(getattr(TuningRow, name) for name in QUESTION), func.count().label("count"))
            .group_by(*(getattr(TuningRow, name) for name in QUESTION))
            .subquery()
        )
        same = [getattr(tuned.c, name) == getattr(BestRow, name) for name in QUESTION]
        query = (
            select(BestRow, func.coalesce(tuned.c.count, 0))
            .outerjoin(tuned, same[0] & same[1] & same[2])
            .where(BestRow.superseded_at.is_(None), BestRow.source == MEASURED)
            .order_by(BestRow.measured_at.desc(), BestRow.id.desc())
        )
        found: dict[tuple[str, ...], CheckCandidate] = {}
        with self.reading() as session:
            last, troubled = _last_checks(session), _troubled(session)
            for row, count in session.execute(query):
                key = tuple(getattr(row, name) for name in QUESTION)
                if key not in found:
                    found[key] = _candidate(row, count, last, troubled)
            known = {item.series for item in found.values()}
            for series, entry_id in troubled.items():
                row = session.get(BestRow, entry_id)
                if series not in known and row is not None:  # another plan took its place: has it recovered?
                    found[(series,)] = _candidate(row, 0, last, {})
        return list(found.values())

    def create_check(self, check: Check) -> bool:
        """Stores a RUNNING check; False if one of that series runs already."""
        going = select(CheckRow.id).where(CheckRow.series == check.series, CheckRow.state == CheckState.RUNNING.value)

        def create() -> bool:
            with self.writing() as session:
                if session.scalar(going) is not None:
                    return False
                session.add(CheckRow(**{name: getattr(check, name) for name in PLAIN}, state=check.state.value))
                flush_new(session, f"a check of series {check.series} runs already", RacedError)
                return True

        return again(create)

    def check(self, check_id: str) -> Check:
        """The check of that id. Raises UnknownNameError."""
        with self.reading() as session:
            row = session.get(CheckRow, check_id)
            if row is None:
                raise UnknownNameError("check", check_id, ())
            return _check_of(row)

    def checks(
        self,
        *,
        series: str | None = None,
        cluster_key: str | None = None,
        state: CheckState | None = None,
        limit: int = 50,
    ) -> Sequence[Check]:
        """The newest checks, newest first."""
        asked = {"series": series, "cluster_key": cluster_key, "state": state and state.value}
        query = select(CheckRow).where(*(getattr(CheckRow, name) == value for name, value in asked.items() if value))
        with self.reading() as session:
            rows = session.scalars(query.order_by(CheckRow.started_at.desc(), CheckRow.id.desc()).limit(limit))
            return [_check_of(row) for row in rows]

    def claim_check(self, check_id: str, owner: str, *, expected_owner: str) -> bool:
        """Makes `owner` the one who measures; False unless the check runs and belongs to `expected_owner`."""
        change = update(CheckRow).where(
            CheckRow.id == check_id, CheckRow.state == CheckState.RUNNING.value, CheckRow.owner == expected_owner
        )
        with self.writing() as session:
            return _changed(session, change.values(owner=owner))

    def add_measurement(self, check_id: str, measurement: CheckMeasurement) -> bool:
        """Stores a measurement and adds its GPU-seconds; False if its number is there or the check has ended."""
        with self.writing() as session:
            row = _locked(session, check_id)
            if row.state != CheckState.RUNNING.value:
                return False
            if session.get(CheckMeasurementRow, (check_id, measurement.number)) is not None:
                return False
            session.add(
                CheckMeasurementRow(
                    check_id=check_id,
                    number=measurement.number,
                    role=measurement.role.value,
                    speed=measurement.speed,
                    at=measurement.at,
                    spec_json=measurement.to_json(),
                )
            )
            row.gpu_s += measurement.gpu_s
            return True

    def measurements(self, check_id: str) -> Sequence[CheckMeasurement]:
        """The measurements of a check by number."""
        query = select(CheckMeasurementRow.spec_json).where(CheckMeasurementRow.check_id == check_id)
        with self.reading() as session:
            found = session.scalars(query.order_by(CheckMeasurementRow.number))
            return [CheckMeasurement.from_json(text) for text in found]

    def end_check(
        self, check_id: str, result: CheckResult, *, key: str = "", channels: Collection[AlertChannel] = ()
    ) -> Check | None:
        """Ends a RUNNING check, once, with what follows for incidents; None if it has ended."""

        def end() -> Check | None:
            with self.writing() as session:
                row = _locked(session, check_id)
                if row.state != CheckState.RUNNING.value:
                    return None
                now = database_now(session)
                row.state, row.ended_at = CheckState.DONE.value, now
                row.verdict, row.effect = result.verdict.value, result.effect
                row.cause = result.cause.kind.value if result.cause else None
                row.result_json = result.to_json()
                note_incident(session, row, result, key, channels, now)
                session.flush()
                return _check_of(row)

        return again(end)

    def abandon_check(self, check_id: str) -> bool:
        """Ends a RUNNING check without a result."""
        change = update(CheckRow).where(CheckRow.id == check_id, CheckRow.state == CheckState.RUNNING.value)
        with self.writing() as session:
            return _changed(session, change.values(state=CheckState.ABANDONED.value, ended_at=database_now(session)))

    def set_check_tuning(self, check_id: str, tuning_id: str) -> bool:
        """Notes the tuning that follows from a check; False if it has one."""
        change = update(CheckRow).where(CheckRow.id == check_id, CheckRow.tuning_id.is_(None))
        with self.writing() as session:
            return _changed(session, change.values(tuning_id=tuning_id))


def _changed(session: Session, statement: Any) -> bool:
    return bool(session.execute(statement).rowcount)  # type: ignore[attr-defined]


def _locked(session: Session, check_id: str) -> CheckRow:
    row = session.scalar(select(CheckRow).where(CheckRow.id == check_id).with_for_update())
    if row is None:
        raise UnknownNameError("check", check_id, ())
    return row


def _last_checks(session: Session) -> dict[str, CheckRow]:
    """The newest ended check of each series."""
    other = aliased(CheckRow)
    newest = (
        select(other.series, func.max(other.started_at).label("at"))
        .where(other.state == CheckState.DONE.value)
        .group_by(other.series)
        .subquery()
    )
    query = select(CheckRow).join(newest, (newest.c.series == CheckRow.series) & (newest.c.at == CheckRow.started_at))
    return {row.series: row for row in session.scalars(query)}


def _troubled(session: Session) -> dict[str, int]:
    """Series in an open incident, with the entry that was checked."""
    query = select(IncidentSeriesRow.series, IncidentSeriesRow.entry_id)
    return dict(session.execute(query.where(IncidentSeriesRow.recovered_at.is_(None))).all())


def _candidate(row: BestRow, tuned: int, last: dict[str, CheckRow], troubled: dict[str, int]) -> CheckCandidate:
    series = series_of_keys(row.model_key, row.cluster_key, row.workload_key, row.plan_key)
    check = last.get(series)
    tokens = row.seq_len * row.global_batch
    return CheckCandidate(
        entry_id=row.id,
        series=series,
        model_name=row.model_name,
        cluster_name=row.cluster_name,
        fingerprint_key=row.fingerprint_key,
        environment_key=row.environment_key,
        devices=row.devices,
        step_s=tokens / (row.tokens_per_s_per_gpu * row.devices),
        measured_at=row.measured_at,
        tuned=tuned,
        checked_at=check.started_at if check else None,
        check_gpu_s=check.gpu_s if check else None,
        open_incident=series in troubled,
    )


def _check_of(row: CheckRow) -> Check:
    return Check(
        **{name: getattr(row, name) for name in PLAIN},
        state=CheckState(row.state),
        result=CheckResult.from_json(row.result_json) if row.result_json else None,
    )
