"""Renewal: keeps a member's lease while its ranks work, and brings the order to stop.

It has a thread of its own, so that a database that is away or slow never holds up what is being measured: the probe
goes on under the last order, and the lease is renewed when the database answers again, if nobody has taken it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError
from autotune.specs import FailureKind, Job, MemberOrder, ProbeProgress
from autotune.tuning.fleet_ports import LEASE_S

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.tuning.fleet_ports import FleetStore
    from workers.pulse import Pulse

log = logging.getLogger("autotune.node")

_EVERY_S = 1.0
_STOPPED = MemberOrder(go_on=False, failure=FailureKind.LOST, reason="the node's worker was shut down")


class Renewal:
    """Renews one member of one job until it is closed.

    Args:
        store: where the lease is.
        job: under this grant.
        node: the member's node.
        session: the worker's.
        pulse: beaten each time that the order is asked for; says when the worker shuts down.
    """

    def __init__(self, store: FleetStore, job: Job, *, node: str, session: str, pulse: Pulse) -> None:
        self._store, self._job, self._node, self._session, self._pulse = store, job, node, session, pulse
        self._order = MemberOrder(go_on=True, endpoint=job.endpoint)
        self._progress: ProbeProgress | None = None
        self._endpoint: str | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._renew_until_closed, name=f"renewal-{job.id}", daemon=True)

    def order(self, progress: ProbeProgress | None = None) -> MemberOrder:
        """Takes the progress to tell, and returns the newest order. Never blocks."""
        self._pulse.beat()
        if progress is not None:
            self._progress = progress
        return _STOPPED if self._pulse.stopping else self._order

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
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def _renew(self) -> None:
        progress, endpoint = self._progress, self._endpoint
        try:
            self._order = self._store.renew_member(
                self._job.id,
                self._job.token,
                self._node,
                self._session,
                lease_s=LEASE_S,
                progress=progress,
                endpoint=endpoint,
            )
        except AutotuneError as error:
            self._note(away=True, reason=str(error))
            return
        self._note(away=False, reason="")
        self._forget(progress, endpoint)

    def _forget(self, progress: ProbeProgress | None, endpoint: str | None) -> None:
        """What was stored is not sent again."""
        if self._progress is progress:
            self._progress = None
        if self._endpoint is endpoint:
            self._endpoint = None

    def _note(self, *, away: bool, reason: str) -> None:
        if away and not self._away:
            log.warning("job %s: the database does not answer, measuring goes on (%s)", self._job.id, reason)
        elif self._away and not away:
            log.info("job %s: the database answers again", self._job.id)
        self._away = away
