"""Jobs: stored, found and cancelled. storage.fleet.leases grants and ends them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache

from pydantic import TypeAdapter
from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import (
    ClusterSpec,
    CollectiveRequest,
    Failure,
    FailureKind,
    Job,
    JobMember,
    JobPurpose,
    JobState,
    MemberReport,
    MemberState,
    ModelSpec,
    ProbeProgress,
    ProbeRequest,
    Trial,
    TrialState,
    TuningState,
    Workload,
)
from storage.database.session import SessionStore, database_now, flush_new
from storage.fleet.tables import JobRow, LeaseRow, MemberRow, NodeRow, of_pool
from storage.tunings.named import locked_tuning
from storage.tunings.rows import values
from storage.tunings.tables import TrialRow, TuningRow
from storage.tunings.tunings import add_trial, fail_trials

REQUEST: TypeAdapter[ProbeRequest] = TypeAdapter(ProbeRequest)
JOB_PLAIN = (
    "id", "pool", "tuning_id", "trial_id", "principal", "environment_key", "only_node", "attempt", "deadline_s",
    "message", "created_at",
)  # fmt: skip
JOB_CHANGING = ("cancelled", "token", "world_id", "warm", "endpoint", "granted_at", "ended_at")
MAX_QUEUED = 1000
ALIKE_FOR, MAX_RECENT = timedelta(hours=1), 200
HOLDING = (JobState.GRANTED.value, JobState.REPORTED.value)
CANCELLED_EARLY = Failure(kind=FailureKind.CANCELLED, message="cancelled before it began")
BUSY = (MemberState.LEASED.value, MemberState.RUNNING.value)

# A cancelled rank says nothing of the cause, and one that lost its peers is a victim: the cause comes first.
LEAST = (FailureKind.COMMUNICATION, FailureKind.CANCELLED)


def lock_jobs(session: Session, job_ids: Collection[str]) -> list[JobRow]:
    """The jobs of those ids that there are, by id, locked until the transaction ends, with their members."""
    query = select(JobRow).where(JobRow.id.in_(job_ids)).order_by(JobRow.id)
    locked = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return list(session.scalars(locked))


def lock_job(session: Session, job_id: str) -> JobRow:
    """One job, locked likewise. Raises UnknownNameError."""
    for row in lock_jobs(session, [job_id]):
        return row
    raise UnknownNameError("job", job_id, ())


def member_of(job: JobRow, node: str) -> MemberRow | None:
    """That node's part in the job."""
    return next((member for member in job.members if member.node == node), None)


def lose_members(jobs: Iterable[JobRow], nodes: Collection[str]) -> None:
    """The busy members on those nodes are LOST."""
    for job in jobs:
        for member in job.members:
            if member.node in nodes and member.state in BUSY:
                member.state = MemberState.LOST.value
        settle(job)


def settle(job: JobRow) -> bool:
    """Makes a GRANTED job REPORTED once no member is busy; says whether it did."""
    if job.state != JobState.GRANTED.value or any(member.state in BUSY for member in job.members):
        return False
    job.state = JobState.REPORTED.value
    return True


def failure_kind(report: MemberReport) -> FailureKind | None:
    """The failure of a member's report: its own, or the most telling one of its ranks. None if it stopped as told."""
    if report.ordered:
        return None
    kinds = [kind for kind in (report.failure, *(rank.failure for rank in report.ranks)) if kind is not None]
    return _most_telling(kinds)


def first_failure(job: JobRow, besides: MemberRow) -> FailureKind | None:
    """How the other members failed, if one did."""
    others = [member for member in job.members if member is not besides]
    kinds = [FailureKind(member.failure_kind) for member in others if member.failure_kind]
    kinds += [FailureKind.LOST for member in others if member.state == MemberState.LOST.value]
    return _most_telling(kinds)


def has_measured(job: JobRow, besides: MemberRow) -> bool:
    """Whether another member reported the speed of a program: then nothing is left for the others to do."""
    reported = MemberState.REPORTED.value
    others = [each for each in job.members if each is not besides and each.state == reported and not each.failure_kind]
    if not others or not _is_program(job.request_json):
        return False
    reports = (MemberReport.from_json(each.report_json) for each in others if each.report_json)
    return any(rank.report and rank.report.get("step_times_s") for report in reports for rank in report.ranks)


def _is_program(request_json: str) -> bool:
    return bool((json.loads(request_json).get("workload") or {}).get("command"))


def _most_telling(kinds: list[FailureKind]) -> FailureKind | None:
    return min(kinds, key=lambda kind: LEAST.index(kind) + 1 if kind in LEAST else 0, default=None)


class JobStore(SessionStore):
    """Jobs, and what they use."""

    def create_job(self, job: Job, *, trial: Trial | None = None, expected_owner: str | None = None) -> None:
        """Stores a QUEUED job, together with its new RUNNING trial if one is given.

        With `expected_owner`, raises StoreConflictError unless the tuning is claimed by that owner (nobody else took
        it, nor was it released), and its state has not ended. Raises StoreConflictError as well if the id exists.
        """
        with self.writing() as session:
            tuning = locked_tuning(session, job.tuning_id) if job.tuning_id is not None else None
            if expected_owner is not None:
                _require_claim(job, tuning, expected_owner)
            if trial is not None:
                add_trial(session, trial)
            add_job(session, job)

    def job(self, job_id: str) -> Job:
        """The job of that id. Raises UnknownNameError."""
        with self.reading() as session:
            return job_of(_row(session, job_id))

    def jobs(
        self,
        *,
        pool: str | None = None,
        tuning_id: str | None = None,
        states: Collection[JobState] | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> Sequence[Job]:
        """Jobs, oldest first, those that come after the job `after`. Raises UnknownNameError for that one."""
        query = select(JobRow)
        if tuning_id is not None:
            query = query.where(JobRow.tuning_id == tuning_id)
        if tuning_id is None or pool is not None:
            query = query.where(of_pool(JobRow.pool, pool))
        if states is not None:
            query = query.where(JobRow.state.in_([state.value for state in states]))
        with self.reading() as session:
            if after is not None:
                last = _row(session, after)
                query = query.where(tuple_(JobRow.created_at, JobRow.id) > tuple_(last.created_at, last.id))
            rows = session.scalars(query.order_by(JobRow.created_at, JobRow.id).limit(limit))
            return [job_of(row) for row in rows]

    def queued_jobs(self, pool: str, *, most_each: int) -> Sequence[Job]:
        """QUEUED jobs of a pool, oldest first: of each purpose of each principal the oldest `most_each`.

        However long the queue of one is, the others' jobs are there: MAX_QUEUED in all, each one's oldest first.
        """
        queued = JobRow.pool == pool, JobRow.state == JobState.QUEUED.value
        place = func.row_number().over(
            partition_by=(JobRow.principal, JobRow.purpose), order_by=(JobRow.created_at, JobRow.id)
        )
        places = select(JobRow.id, place.label("place")).where(*queued).subquery("places")
        first = select(places.c.id).where(places.c.place <= most_each).order_by(places.c.place).limit(MAX_QUEUED)
        with self.reading() as session:
            # Two queries: of a queue that has just grown PostgreSQL knows no size yet, and would join it with itself.
            found = select(JobRow).where(JobRow.id.in_(session.scalars(first).all()), *queued)
            return [job_of(row) for row in session.scalars(found.order_by(JobRow.created_at, JobRow.id))]

    def unsent_members(self, older_than_s: float) -> Sequence[Job]:
        """GRANTED jobs with a member still LEASED that long after the grant: their message may be lost."""
        waiting = select(MemberRow).where(MemberRow.job_id == JobRow.id, MemberRow.state == MemberState.LEASED.value)
        query = select(JobRow).where(JobRow.state == JobState.GRANTED.value, of_pool(JobRow.pool), waiting.exists())
        with self.reading() as session:
            before = database_now(session) - timedelta(seconds=older_than_s)
            rows = session.scalars(query.where(JobRow.granted_at <= before).order_by(JobRow.created_at, JobRow.id))
            return [job_of(row) for row in rows]

    def leased_nodes(self, pool: str | None = None) -> dict[str, str]:
        """Node name -> id of the job that holds it."""
        query = select(LeaseRow.node, LeaseRow.job_id).join(NodeRow, NodeRow.name == LeaseRow.node)
        query = query.where(of_pool(NodeRow.pool, pool))
        with self.reading() as session:
            return dict(session.execute(query).all())

    def gpu_s_by_principal(self, since: datetime) -> dict[str, float]:
        """GPU-seconds that each principal's jobs used since then: the devices that they held, while they held them."""
        columns = (JobRow.principal, JobRow.devices, JobRow.granted_at, JobRow.ended_at)
        query = select(*columns).where(or_(JobRow.ended_at > since, JobRow.state.in_(HOLDING)), of_pool(JobRow.pool))
        used: dict[str, float] = {}
        with self.reading() as session:
            rows = session.execute(query).all()
            now = database_now(session)
        for principal, devices, granted_at, ended_at in rows:
            if granted_at is not None:
                held_s = ((ended_at or now) - max(granted_at, since)).total_seconds()
                used[principal] = used.get(principal, 0.0) + devices * max(held_s, 0.0)
        return used

    def alike_jobs(self, job: Job, *, limit: int) -> Sequence[Job]:
        """Jobs that went well within the last hour, newest first: of the same purpose, pool, cluster and environment,
        for the same model and workload; probes of a layer of the same layer alone.
        """
        same = (
            JobRow.pool == job.pool, JobRow.purpose == job.purpose.value, JobRow.failure_kind.is_(None),
            JobRow.environment_key == job.environment_key, JobRow.cluster_json == job.cluster.to_json(),
            JobRow.id != job.id,
        )  # fmt: skip
        wanted = _shape(job.request.to_json())
        with self.reading() as session:
            since = database_now(session) - ALIKE_FOR
            recent = select(JobRow.id, JobRow.request_json).where(JobRow.ended_at > since, *same)
            newest = session.execute(recent.order_by(JobRow.ended_at.desc()).limit(MAX_RECENT)).all()
            ids = [each for each, text in newest if _shape(text) == wanted][:limit]
            found = session.scalars(select(JobRow).where(JobRow.id.in_(ids)).order_by(JobRow.ended_at.desc()))
            return [job_of(row) for row in found]

    def cancel_job(self, job_id: str) -> bool:
        """Ends a job of no tuning that is still QUEUED; False if it is not. Raises UnknownNameError."""
        with self.writing() as session:
            row = lock_job(session, job_id)
            if row.tuning_id is not None or row.state != JobState.QUEUED.value:
                return False
            row.cancelled = True
            end_queued(row, database_now(session))
            return True

    def cancel_jobs(self, tuning_id: str) -> Sequence[Job]:
        """Ends the tuning's QUEUED jobs (their trials fail as CANCELLED) and marks its granted ones cancelled.

        Returns the jobs still granted.
        """
        with self.writing() as session:
            rows = lock_live(session, tuning_id)
            cancel_rows(session, rows, locked_tuning(session, tuning_id), database_now(session))
            return [job_of(row) for row in rows if row.state == JobState.GRANTED.value]


def lock_live(session: Session, tuning_id: str) -> list[JobRow]:
    """The jobs of a tuning that have not ended, locked: before the tuning is."""
    ids = session.scalars(select(JobRow.id).where(JobRow.tuning_id == tuning_id, JobRow.ended_at.is_(None))).all()
    return lock_jobs(session, ids) if ids else []


def cancel_rows(session: Session, rows: Sequence[JobRow], tuning: TuningRow, now: datetime) -> bool:
    """Ends those of a locked tuning's locked jobs that are QUEUED, their trials too, and marks the granted ones.

    Says whether one was queued. However many there are, the statements are as many.
    """
    queued = [row for row in rows if row.state == JobState.QUEUED.value]
    for row in rows:
        row.cancelled = row.cancelled or row.state != JobState.ENDED.value
    for row in queued:
        end_queued(row, now)
    session.flush()
    ids = [row.trial_id for row in queued if row.trial_id is not None]
    if ids:
        fail_trials(session, ids, tuning, CANCELLED_EARLY, now)
    return bool(queued)


def _shape(request_json: str) -> dict[str, object]:
    """What makes two requests alike."""
    request: dict[str, object] = json.loads(request_json)
    if request["kind"] == "step":
        return {name: request[name] for name in ("kind", "model", "workload")}
    return {name: value for name, value in request.items() if name != "seed"}


def add_job(session: Session, job: Job) -> None:
    """Stores a job, QUEUED. Raises StoreConflictError."""
    session.add(job_row(job))
    flush_new(session, f"job {job.id!r} exists already, or its tuning or trial does not")


def _row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise UnknownNameError("job", job_id, ())
    return row


def trial_runs(session: Session, trial_id: str) -> bool:
    """Whether that trial has not ended."""
    return session.scalar(select(TrialRow.state).where(TrialRow.id == trial_id)) == TrialState.RUNNING.value


def _require_claim(job: Job, tuning: TuningRow | None, owner: str) -> None:
    if tuning is None:
        raise StoreConflictError(f"job {job.id!r} has no tuning that {owner!r} could have claimed")
    if tuning.owner != owner or tuning.claim_expires_at is None:
        raise StoreConflictError(f"tuning {tuning.id!r} is owned by {tuning.owner!r}, not by {owner!r}")
    if TuningState(tuning.state).ended:
        raise StoreConflictError(f"tuning {tuning.id!r} has ended already: it is {tuning.state}")


def end_queued(row: JobRow, now: datetime) -> None:
    """Ends a locked job that is QUEUED as CANCELLED; its trial, if it has one, is the caller's."""
    row.state, row.ended_at = JobState.ENDED.value, now
    row.failure_kind, row.message = CANCELLED_EARLY.kind.value, CANCELLED_EARLY.message


# From the specs to rows and back.


def job_row(job: Job) -> JobRow:
    """The row of a new job: queued, whatever else the record says."""
    return JobRow(
        **values(job, JOB_PLAIN),
        purpose=job.purpose.value,
        cluster_json=job.cluster.to_json(),
        devices=job.cluster.devices,
        request_json=job.request.to_json(),
        avoid_json=json.dumps(job.avoid),
        state=JobState.QUEUED.value,
        cancelled=False,
        token=0,
        world_id="",
        warm=False,
        endpoint="",
    )


def job_of(row: JobRow) -> Job:
    """The job of a row, with its members in order."""
    return Job(
        **values(row, (*JOB_PLAIN, *JOB_CHANGING)),
        purpose=JobPurpose(row.purpose),
        cluster=_cluster_of(row.cluster_json),
        request=_request_of(row.request_json),
        avoid=tuple(json.loads(row.avoid_json)),
        state=JobState(row.state),
        progress=ProbeProgress.from_json(row.progress_json) if row.progress_json else None,
        failure=FailureKind(row.failure_kind) if row.failure_kind else None,
        members=tuple(_member_of(member) for member in row.members),
    )


@lru_cache(maxsize=64)
def _cluster_of(text: str) -> ClusterSpec:
    """Most jobs are of few clusters and requests, and parsing them is most of the time that a long queue takes."""
    return ClusterSpec.from_json(text)


@lru_cache(maxsize=1024)
def _request_of(text: str) -> ProbeRequest:
    """A request for each seed and plan; what they are about is in memory once, or a tuner grows for hours."""
    request = REQUEST.validate_json(text)
    if isinstance(request, CollectiveRequest):
        return request
    return request.model_copy(update={"model": _same(request.model), "workload": _same(request.workload)})


@lru_cache(maxsize=64)
def _same(spec: ModelSpec | Workload) -> ModelSpec | Workload:
    """The first one that was equal."""
    return spec


def _member_of(row: MemberRow) -> JobMember:
    return JobMember(
        **values(row, ("node", "address", "expires_at")),
        index=row.number,
        state=MemberState(row.state),
        report=MemberReport.from_json(row.report_json) if row.report_json else None,
    )
