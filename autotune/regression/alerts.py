"""Delivery: what waits in the store is sent, each alert by one process, and tried again with back-off.

The store is the queue. Who has it sent never waits for a receiver: each channel has a thread of its own (Outbox).
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from threading import Thread

from autotune.errors import StoreAwayError
from autotune.ports.regression import RegressionStore
from autotune.regression.senders import InTime, Mail, Sender, SendError, Webhook
from autotune.settings import Settings
from autotune.specs.regression import Alert, AlertChannel

log = logging.getLogger("autotune.alerts")

LEASE = timedelta(minutes=2)
"""How long one process may take to send one alert, before another takes it: more than senders.InTime ever does."""

FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=5), timedelta(hours=6)
MAX_ATTEMPTS = 20  # over about two days
PATIENCE_S = 60.0
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
"""When an alert that was given up is due."""


def now_utc() -> datetime:
    """The present moment."""
    return datetime.now(UTC)


def senders_of(settings: Settings, clock: Callable[[], datetime] = now_utc) -> dict[AlertChannel, Sender]:
    """The channels that are set up. Raises InputError for one that is set up half or wrongly."""
    found: dict[AlertChannel, Sender] = {}
    if settings.webhook_url:
        found[AlertChannel.WEBHOOK] = InTime(Webhook(settings.webhook_url, settings.webhook_secret, clock))
    if settings.smtp_url:
        sender = settings.alert_sender or f"autotune@{socket.gethostname()}"
        found[AlertChannel.EMAIL] = InTime(Mail(settings.smtp_url, settings.alert_email, sender))
    return found


class Outbox:
    """Has alerts sent by threads, one a channel: no receiver holds up whoever asks, or another channel.

    Args:
        store: where alerts wait; used by the threads too.
        senders: of the channels that are set up.
    """

    def __init__(self, store: RegressionStore, senders: Mapping[AlertChannel, Sender]) -> None:
        self._store, self._senders = store, senders
        self._threads: dict[AlertChannel, Thread] = {}

    @property
    def channels(self) -> tuple[AlertChannel, ...]:
        """The channels that are set up."""
        return tuple(self._senders)

    def send(self) -> None:
        """Begins to send what is due, unless that is under way. Never waits."""
        for channel, sender in self._senders.items():
            thread = self._threads.get(channel)
            if thread is None or not thread.is_alive():
                thread = Thread(target=self._deliver, args=({channel: sender},), name=f"alerts-{channel}", daemon=True)
                self._threads[channel] = thread
                thread.start()

    def join(self) -> None:
        """Waits for what is under way."""
        for thread in self._threads.values():
            thread.join()

    def _deliver(self, senders: Mapping[AlertChannel, Sender]) -> None:
        try:
            deliver(self._store, senders)
        except StoreAwayError:
            log.debug("alerts wait for the database")
        except Exception:
            log.exception("alerts could not be sent")


def deliver(
    store: RegressionStore,
    senders: Mapping[AlertChannel, Sender],
    *,
    clock: Callable[[], datetime] = now_utc,
    end_s: float = math.inf,
) -> int:
    """Sends what is due once; returns how many alerts failed. An alert may arrive twice, never not at all.

    Args:
        store: where alerts wait.
        senders: of the channels to send by.
        clock: the present moment.
        end_s: of the monotonic clock; no alert is begun after it.
    """
    failed = 0
    for alert in store.due_alerts(clock()):
        if time.monotonic() > end_s:
            break
        sender = senders.get(alert.channel)
        if sender is None or not store.claim_alert(alert.key, clock(), LEASE):
            continue
        failed += not _send(store, alert, sender, clock)
    return failed


def deliver_patiently(
    store: RegressionStore, senders: Mapping[AlertChannel, Sender], *, patience_s: float = PATIENCE_S
) -> int:
    """The same for a process that ends soon: what fails is tried again for a while. Returns how many alerts are left.

    What is left is sent by whoever delivers next.
    """
    end_s = time.monotonic() + patience_s
    while deliver(store, senders, end_s=end_s) and time.monotonic() < end_s:
        time.sleep(FIRST_PAUSE.total_seconds())
    return sum(alert.channel in senders and alert.due_at < NEVER for alert in store.due_alerts(NEVER))


def _send(store: RegressionStore, alert: Alert, sender: Sender, clock: Callable[[], datetime]) -> bool:
    try:
        sender.send(alert)
    except SendError as error:
        attempts = alert.attempts + 1
        pause = min(FIRST_PAUSE * 2 ** (attempts - 1), MAX_PAUSE)
        due_at = clock() + pause if attempts < MAX_ATTEMPTS else NEVER
        store.note_alert(alert.key, sent_at=None, due_at=due_at, error=str(error))
        log.warning("alert %s by %s: %s", alert.key, alert.channel, error)
        if due_at == NEVER:
            log.error("alert %s by %s is given up after %d attempts", alert.key, alert.channel, attempts)
        return False
    now = clock()
    store.note_alert(alert.key, sent_at=now, due_at=now, error="")
    return True


def unsent_line(alert: Alert) -> str:
    """Of an alert that was not taken, in one line for people: why, how often it was tried, and what comes next."""
    outlook = "given up" if alert.due_at == NEVER else f"tried again from {alert.due_at:%Y-%m-%d %H:%M:%S} UTC"
    what = f"Not told by {alert.channel}: incident {alert.incident.id} {alert.event}"
    return f"{what}: {alert.error or 'not tried'} ({alert.attempts} attempts, {outlook})"
