"""Delivery: what waits in the store is sent, each alert by one process, and tried again with back-off."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Protocol

from autotune.ports.regression import RegressionStore
from autotune.regression.senders import Mail, SendError, Webhook
from autotune.settings import Settings
from autotune.specs.regression import Alert, AlertChannel

log = logging.getLogger("autotune.alerts")

LEASE = timedelta(minutes=2)
"""How long one process may take to send one alert, before another takes it."""

FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=5), timedelta(hours=6)
MAX_ATTEMPTS = 20  # over about two days
PATIENCE_S = 60.0
NEVER = datetime(9999, 1, 1, tzinfo=UTC)


class Sender(Protocol):
    """One channel."""

    def send(self, alert: Alert) -> None:
        """Sends one alert. Raises SendError."""


def now_utc() -> datetime:
    """The present moment."""
    return datetime.now(UTC)


def senders_of(settings: Settings, clock: Callable[[], datetime] = now_utc) -> dict[AlertChannel, Sender]:
    """The channels that are set up. Raises InputError for one that is set up half or wrongly."""
    found: dict[AlertChannel, Sender] = {}
    if settings.webhook_url:
        found[AlertChannel.WEBHOOK] = Webhook(settings.webhook_url, settings.webhook_secret, clock)
    if settings.smtp_url:
        sender = settings.alert_sender or f"autotune@{socket.gethostname()}"
        found[AlertChannel.EMAIL] = Mail(settings.smtp_url, settings.alert_email, sender)
    return found


def deliver(
    store: RegressionStore, senders: Mapping[AlertChannel, Sender], *, clock: Callable[[], datetime] = now_utc
) -> int:
    """Sends what is due once; returns how many alerts failed. An alert may arrive twice, never not at all."""
    failed = 0
    for alert in store.due_alerts(clock()):
        sender = senders.get(alert.channel)
        if sender is None or not store.claim_alert(alert.key, clock(), LEASE):
            continue
        failed += not _send(store, alert, sender, clock())
    return failed


def deliver_patiently(
    store: RegressionStore, senders: Mapping[AlertChannel, Sender], *, patience_s: float = PATIENCE_S
) -> int:
    """The same for a process that ends soon: what fails is tried again for a while. Returns how many alerts are left.

    What is left is sent by whoever delivers next.
    """
    end_s = time.monotonic() + patience_s
    while deliver(store, senders) and time.monotonic() < end_s:
        time.sleep(FIRST_PAUSE.total_seconds())
    return sum(alert.channel in senders for alert in store.due_alerts(NEVER - timedelta(days=1)))


def _send(store: RegressionStore, alert: Alert, sender: Sender, now: datetime) -> bool:
    try:
        sender.send(alert)
    except SendError as error:
        attempts = alert.attempts + 1
        due_at = now + min(FIRST_PAUSE * 2 ** (attempts - 1), MAX_PAUSE) if attempts < MAX_ATTEMPTS else NEVER
        store.note_alert(alert.key, sent_at=None, due_at=due_at, error=str(error))
        log.warning("alert %s by %s: %s", alert.key, alert.channel, error)
        return False
    store.note_alert(alert.key, sent_at=now, due_at=now, error="")
    return True
