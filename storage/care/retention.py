"""Retention: what nothing reads any more is deleted, once it is old enough.

Kept whatever its age: what failed and why, how each job, member and trial ended, a node's newest incident (its next
health check counts from it), keys of requests that are under way, and the ranks of trials of best-known plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from sqlalchemy import CursorResult, Delete, Select, Update, delete, func, or_, select, update
from sqlalchemy.orm import Session

from autotune.specs import TuningState
from storage.fleet.tables import EventRow, IdempotencyRow, JobRow, MemberRow, NodeIncidentRow
from storage.knowledge import BestRow
from storage.store import SqlStore
from storage.tunings.tables import ProbeRow, RankCommRow, RankRow, StepRow, TrialRow, TuningRow

AT_ONCE = 500
ENDED = tuple(state.value for state in TuningState if state.ended)
Id = TypeVar("Id", int, str)


def drop_logs(store: SqlStore, before: datetime) -> int:
    """Logs of probes that failed before then. Gives the probes changed."""
    change = update(ProbeRow).where(ProbeRow.finished_at < before, ProbeRow.failure_log_tail != "")
    with store.writing() as session:
        return changed(session, change.values(failure_log_tail=""))


def drop_events(store: SqlStore, before: datetime) -> int:
    """Lines of the logs of tunings that ended before then."""
    ended = select(TuningRow.id).where(TuningRow.state.in_(ENDED), TuningRow.updated_at < before)
    with store.writing() as session:
        return changed(session, delete(EventRow).where(EventRow.tuning_id.in_(ended), EventRow.at < before))


def drop_reports(store: SqlStore, before: datetime) -> Iterator[int]:
    """What each rank reported of jobs that ended before then: their results are stored. Gives the members changed."""
    told = select(MemberRow).where(MemberRow.job_id == JobRow.id, MemberRow.report_json.is_not(None)).exists()
    query = select(JobRow.id).where(JobRow.ended_at < before, told)
    for session, ids in pieces(store, query, JobRow.id, ""):
        members = update(MemberRow).where(MemberRow.job_id.in_(ids), MemberRow.report_json.is_not(None))
        yield changed(session, members.values(report_json=None))


def drop_ranks(store: SqlStore, before: datetime) -> Iterator[int]:
    """What each rank saw in steps that ended before then, but for best-known plans. Gives the ranks that are gone."""
    ended = or_(TrialRow.finished_at < before, ProbeRow.finished_at < before)
    known = select(BestRow).where(BestRow.tuning_id == TrialRow.tuning_id, BestRow.plan_key == TrialRow.plan_key)
    query = (
        select(StepRow.id)
        .outerjoin(TrialRow, TrialRow.id == StepRow.trial_id)
        .outerjoin(ProbeRow, ProbeRow.id == StepRow.probe_run_id)
        .where(ended, ~known.exists(), select(RankRow).where(RankRow.step_measurement_id == StepRow.id).exists())
    )
    for session, ids in pieces(store, query, StepRow.id, 0):
        ranks = select(RankRow.id).where(RankRow.step_measurement_id.in_(ids))
        session.execute(delete(RankCommRow).where(RankCommRow.rank_measurement_id.in_(ranks)))
        yield changed(session, delete(RankRow).where(RankRow.step_measurement_id.in_(ids)))


def drop_incidents(store: SqlStore, before: datetime) -> int:
    """Incidents of nodes before then, but for each node's newest."""
    newest = select(func.max(NodeIncidentRow.id)).group_by(NodeIncidentRow.node)
    with store.writing() as session:
        return changed(
            session, delete(NodeIncidentRow).where(NodeIncidentRow.at < before, NodeIncidentRow.id.not_in(newest))
        )


def drop_keys(store: SqlStore, before: datetime) -> int:
    """Idempotency keys that were first used before then, of tunings that have ended."""
    ended = select(TuningRow.id).where(TuningRow.state.in_(ENDED))
    old = delete(IdempotencyRow).where(IdempotencyRow.created_at < before, IdempotencyRow.tuning_id.in_(ended))
    with store.writing() as session:
        return changed(session, old)


def changed(session: Session, statement: Update | Delete) -> int:
    """Runs a statement; returns how many rows it changed."""
    return cast("CursorResult[Any]", session.execute(statement)).rowcount


def pieces(store: SqlStore, query: Select[Id], column: Any, last: Id) -> Iterator[tuple[Session, Sequence[Id]]]:
    """Ids that a query finds, some at a time in their order, each time in a transaction of their own.

    Writers then need not wait, and whatever is interrupted is simply run again.
    """
    while True:
        with store.writing() as session:
            ids = session.scalars(query.where(column > last).order_by(column).limit(AT_ONCE)).all()
            if not ids:
                return
            last = ids[-1]
            yield session, ids
