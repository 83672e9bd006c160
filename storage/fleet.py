"""The part of a store that makes it a FleetStore (autotune.tuning.fleet_ports)."""

from __future__ import annotations

from datetime import datetime

from storage.clock import database_now
from storage.counts import CountStore
from storage.endings import EndingStore
from storage.events import EventStore
from storage.expiry import ExpiryStore
from storage.jobs import JobStore
from storage.keys import KeyStore
from storage.leases import LeaseStore
from storage.nodes import NodeStore
from storage.pages import PageStore
from storage.submissions import SubmissionStore


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
