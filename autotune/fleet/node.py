"""A node's side of its jobs: it runs its share of each on its ranks, under a lease, and tells what came of it.

A worker (workers.roles) and a machine that is a fleet of one (fleet.local) act by it alike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from autotune.errors import AutotuneError, StoreAwayError, StoreError
from autotune.specs import FailureKind, Job, JobState, MemberOrder, MemberReport, ProbeProgress, ProbeRequest

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.fleet.service import FleetService
    from autotune.ports.fleet import FleetStore
    from autotune.settings import FleetTimes

log = logging.getLogger("autotune.node")

_STOPPED = MemberOrder(go_on=False, failure=FailureKind.LOST, reason="the node's worker was shut down")


class Heartbeat(Protocol):
    """What tells others that this node works, and it that it is to end."""

    def renew(self) -> None:
        """A task was consumed, or a probe goes on."""

    @property
    def stopping(self) -> bool:
        """Whether the node's process shuts down."""

    def evict(self) -> None:
        """Another process has taken this one's name."""


class Ranks(Protocol):
    """The ranks of this node."""

    def run(
        self,
        share: Any,
        request: ProbeRequest,
        *,
        deadline_s: float,
        publish: Callable[[str], object],
        order: Callable[..., MemberOrder],
    ) -> MemberReport:
        """Runs this node's share of a job."""

    def close(self) -> None:
        """Ends the ranks."""


class Renewal:
    """Renews the lease of one member of one job until it is closed, and brings the order to stop.

    It has a thread of its own, so that a database that is away or slow never holds up what is being measured: the probe
    goes on under the last order, and the lease is renewed when the database answers again, if nobody has taken it.

    Args:
        store: where the lease is.
        job: under this grant.
        node: the member's node.
        session: the worker's.
        heartbeat: beaten each time that the order is asked for; says when the worker shuts down.
        times: of the lease.
    """

    def __init__(
        self, store: FleetStore, job: Job, *, node: str, session: str, heartbeat: Heartbeat, times: FleetTimes
    ) -> None:
        self._store, self._job, self._node, self._session, self._heartbeat = store, job, node, session, heartbeat
        self._times = times
        self._order = MemberOrder(go_on=True, endpoint=job.endpoint)
        self._progress: ProbeProgress | None = None
        self._endpoint: str | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name=f"renewal-{job.id}", daemon=True)

    def order(self, progress: ProbeProgress | None = None) -> MemberOrder:
        """Takes the progress to tell, and returns the newest order. Never blocks."""
        self._heartbeat.renew()
        if progress is not None:
            self._progress = progress
        return _STOPPED if self._heartbeat.stopping else self._order

    def publish(self, endpoint: str) -> None:
        """Takes the host:port to tell the other members; told as soon as the database takes it. Never blocks."""
        self._endpoint = endpoint
        self._wake.set()

    def __enter__(self) -> Renewal:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        self._wake.set()

    def _renew_until_closed(self) -> None:
        while not self._closed.is_set():
            self._renew()
            self._wake.wait(self._times.renew_every_s)
            self._wake.clear()

    def _renew(self) -> None:
        progress, endpoint = self._progress, self._endpoint
        try:
            self._order = self._store.renew_member(
                self._job.id,
                self._job.token,
                self._node,
                self._session,
                lease_s=self._times.lease_s,
                progress=progress,
                endpoint=endpoint,
            )
        except StoreAwayError:  # the store has said so
            return
        except AutotuneError as error:
            if not self._closed.is_set():
                log.warning("job %s: its lease was not renewed (%s)", self._job.id, error)
            return
        self._forget(progress, endpoint)

    def _forget(self, progress: ProbeProgress | None, endpoint: str | None) -> None:
        """What was stored is not sent again."""
        if self._progress is progress:
            self._progress = None
        if self._endpoint is endpoint:
            self._endpoint = None


# While this node cannot reach the database nobody may know whether its lease was swept, so it keeps its report for as
# long as its message is its own (autotune.queue.app: between the longest deadline and the visibility timeout).
_REPORT_S = 1800.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0

# A node runs one task at a time, so a member of its own session that runs while a delivery of it comes again was left
# by a process that died. For one that has reported, or under another grant or session, the store takes no report.
_ABANDONED = MemberReport(failure=FailureKind.LOST, message="the process that ran the node's ranks died")


class NodeHandlers:
    """What a node does when it is told. Lives in the process that runs its ranks.

    Args:
        name: the node's.
        session: of this worker.
        store: where jobs and leases are.
        fleet: ends jobs.
        ranks: of this node.
        share_of: the part of a job's world that a node contributes, as its ranks take it.
        heartbeat: beaten while a job goes on.
        times: of leases.
    """

    def __init__(
        self,
        *,
        name: str,
        session: str,
        store: FleetStore,
        fleet: FleetService,
        ranks: Ranks,
        share_of: Callable[[Job, str], Any],
        heartbeat: Heartbeat,
        times: FleetTimes,
    ) -> None:
        self._name, self._session, self._times = name, session, times
        self._store, self._fleet, self._ranks, self._share_of = store, fleet, ranks, share_of
        self._heartbeat = heartbeat

    def canary(self, session: str) -> None:
        """Proves that this worker consumes: renews the node's heartbeat, or finds that another worker has its name."""
        if session == self._session and not self._store.renew_node(self._name, self._session):
            log.error("node %s belongs to another worker now: this one ends", self._name)
            self._heartbeat.evict()

    def run(self, job_id: str, token: int) -> None:
        """Runs this node's share of a job, unless the delivery is late, doubled or for an older session."""
        job = self._store.start_member(job_id, token, self._name, self._session, lease_s=self._times.lease_s)
        if job is None:
            log.info("job %s: delivery under token %d dropped, it is not to be started", job_id, token)
            report = _ABANDONED
        else:
            log.info("job %s: started (%s, token %d, attempt %d)", job.id, job.request.kind, token, job.attempt)
            report = self._measure(job)
        reported = self._report(job_id, token, report)
        if reported is None:
            log.info("job %s: the report under token %d is not wanted", job_id, token)
            return
        if self._heartbeat.stopping:
            self._sign_off()  # before somebody grants it the next attempt
        if reported.state is JobState.REPORTED:
            self._fleet.finish(reported)
            log.info("job %s: finished", reported.id)

    def close(self) -> None:
        """Ends the ranks, and takes the node out of the fleet until a worker registers it again."""
        self._ranks.close()
        self._sign_off()

    def _sign_off(self) -> None:
        try:
            self._store.retire_node(self._name, self._session)
        except StoreError as error:
            log.warning("node %s: not signed off, its heartbeat will tell (%s)", self._name, error)
        else:
            log.info("node %s: signed off", self._name)

    def _measure(self, job: Job) -> MemberReport:
        renewal = Renewal(
            self._store, job, node=self._name, session=self._session, heartbeat=self._heartbeat, times=self._times
        )
        with renewal:
            report = self._ranks.run(
                self._share_of(job, self._name),
                job.request,
                deadline_s=job.deadline_s,
                publish=renewal.publish,
                order=renewal.order,
            )
        outcome = f"{report.failure}: {report.message}" if report.failure else f"{len(report.ranks)} ranks answered"
        log.info("job %s: %s after %.1f s", job.id, outcome, report.wall_s)
        return report

    def _report(self, job_id: str, token: int, report: MemberReport) -> Job | None:
        """Stores the report, trying again while the database is away. None if it is not wanted any more."""
        give_up_at, wait_s = time.monotonic() + _REPORT_S, _RETRY_S
        while True:
            self._heartbeat.renew()
            try:
                return self._store.report_member(job_id, token, self._name, self._session, report)
            except StoreError as error:
                if self._heartbeat.stopping or time.monotonic() > give_up_at:
                    log.error("job %s: the report is lost (%s)", job_id, error)
                    return None
                if not isinstance(error, StoreAwayError):
                    log.warning("job %s: not reported yet (%s)", job_id, error)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
