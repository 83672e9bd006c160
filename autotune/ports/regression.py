"""What the nightly regression needs to remember: a RegressionStore. storage implements it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from autotune.ports.fleet import FleetStore
from autotune.ports.store import KnowledgeStore
from autotune.specs.regression import (
    Alert,
    AlertChannel,
    Check,
    CheckCandidate,
    CheckMeasurement,
    CheckResult,
    CheckState,
    Incident,
)


class RegressionStore(KnowledgeStore, Protocol):
    """A store that remembers checks and incidents. Each method is one transaction."""

    def check_candidates(self) -> Sequence[CheckCandidate]:
        """The current entries of our own measurements, the newest environment's of each question, newest first; then
        those of plans in open incidents that another plan has replaced since.
        """

    def create_check(self, check: Check) -> bool:
        """Stores a RUNNING check; False if one of that series runs already."""

    def check(self, check_id: str) -> Check:
        """The check of that id. Raises UnknownNameError."""

    def checks(
        self,
        *,
        series: str | None = None,
        cluster_key: str | None = None,
        state: CheckState | None = None,
        limit: int = 50,
    ) -> Sequence[Check]:
        """The newest checks, newest first."""

    def claim_check(self, check_id: str, owner: str, *, expected_owner: str) -> bool:
        """Makes `owner` the one who measures; False unless the check runs and belongs to `expected_owner`."""

    def add_measurement(self, check_id: str, measurement: CheckMeasurement) -> bool:
        """Stores a measurement and adds its GPU-seconds; False if its number is there or the check has ended."""

    def measurements(self, check_id: str) -> Sequence[CheckMeasurement]:
        """The measurements of a check by number."""

    def end_check(
        self, check_id: str, result: CheckResult, *, key: str = "", channels: Collection[AlertChannel] = ()
    ) -> Check | None:
        """Ends a RUNNING check, once: None if it has ended.

        A worse result opens the incident of that `key`, or joins its series to an open one; a series that is in an open
        incident already stays in that one. Unchanged and better ones take their series out of its incident, which has
        recovered when it is the last. Each opening and recovery becomes one alert a channel.
        """

    def abandon_check(self, check_id: str) -> bool:
        """Ends a RUNNING check without a result."""

    def set_check_tuning(self, check_id: str, tuning_id: str) -> bool:
        """Notes the tuning that follows from a check; False if it has one."""

    def incidents_page(self, *, open_only: bool = False, limit: int = 50) -> Sequence[Incident]:
        """The newest incidents, newest first."""

    def due_alerts(self, now: datetime) -> Sequence[Alert]:
        """Alerts that were not sent and may be tried, oldest first."""

    def claim_alert(self, key: str, now: datetime, lease: timedelta) -> bool:
        """Takes a due alert for that long, so that nobody else sends it meanwhile; False if somebody has."""

    def note_alert(self, key: str, *, sent_at: datetime | None, due_at: datetime, error: str) -> None:
        """Writes how sending went: sent, or an error and when to try again."""


class FleetRegressionStore(FleetStore, RegressionStore, Protocol):
    """What a fleet's regression needs."""
