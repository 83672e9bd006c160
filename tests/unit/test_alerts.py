"""Alerts over real servers on this machine: signed, sent once, tried again."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session
from databases import Databases
from regression_nights import Nights

from autotune.errors import InputError
from autotune.regression.alerts import NEVER, Outbox, deliver, deliver_patiently, now_utc, senders_of, unsent_line
from autotune.regression.senders import KEY_HEADER, SIGNATURE_HEADER, InTime, Mail, SendError, Webhook
from autotune.settings import Settings, read_settings
from autotune.specs.regression import Alert, AlertChannel, AlertEvent, CauseKind, Incident
from storage import SqlStore, open_store

SECRET = "swordfish"
AMPLE_S = 60.0
MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
INCIDENT = Incident(
    id=7, key="k", kind=CauseKind.LINK_ACROSS, subject="link wire\nacross", message="half as fast", check_id="c1",
    opened_at=MOMENT, series=("s",), entries=(1, 2),
)  # fmt: skip


def alert(event: AlertEvent = AlertEvent.OPENED) -> Alert:
    return Alert(key="c1-opened", incident=INCIDENT, event=event, channel=AlertChannel.EMAIL, at=MOMENT, due_at=MOMENT)


@dataclass
class Receiver:
    """What a webhook's server was sent; it answers with `answers`, the last one for ever."""

    url: str = ""
    answers: list[int] = field(default_factory=lambda: [204])
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((dict(self.headers), body))
                code = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", receiver.url + "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


@contextmanager
def http_server(receiver: Receiver) -> Iterator[Receiver]:
    with HTTPServer(("127.0.0.1", 0), receiver.handler()) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_server(Receiver()) as found:
        yield found


class Mailbox:
    """What a mail server was sent."""

    def __init__(self) -> None:
        self.got: list[Envelope] = []
        self.arrived = Event()

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        self.got.append(envelope)
        self.arrived.set()
        return "250 OK"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def mail() -> Iterator[tuple[str, Mailbox]]:
    box, port = Mailbox(), free_port()
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    yield f"smtp://127.0.0.1:{port}", box
    controller.stop()


def worsen(url: str) -> None:
    with open_store(url) as opened:
        nights = Nights(opened, channels=tuple(AlertChannel))
        nights.check()
        nights.check(inside=2.0)


@pytest.fixture
def store(databases: Databases, tmp_path: Path) -> Iterator[SqlStore]:
    """With an incident that is to be told to both channels."""
    with open_store(databases.filled("sqlite", tmp_path, worsen)) as opened:
        yield opened


@contextmanager
def slow_server(drip: bytes, *, every_s: float = 0.05) -> Iterator[tuple[int, Event]]:
    """Its port, and an event for its first caller. It sends that byte again and again, or nothing, and never ends."""
    called, over = Event(), Event()

    def serve(server: socket.socket) -> None:
        with suppress(OSError):  # closed at the end of the test
            while not over.is_set():
                connection, _ = server.accept()
                called.set()
                Thread(target=hold, args=(connection,), daemon=True).start()

    def hold(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while not over.wait(every_s):
                connection.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1], called
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def settings(**changes: Any) -> Settings:
    return Settings(database_url="sqlite://", log_dir=Path("/nowhere"), **changes)


def now() -> datetime:
    return datetime.now(UTC)


def test_a_webhook_is_signed_over_time_and_body(receiver: Receiver) -> None:
    Webhook(receiver.url, SECRET, lambda: MOMENT).send(alert())
    ((headers, body),) = receiver.got
    stamp = int(MOMENT.timestamp())
    expected = hmac.new(SECRET.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    assert headers[SIGNATURE_HEADER] == f"t={stamp},v1={expected}"
    assert headers[KEY_HEADER] == "c1-opened"
    data = json.loads(body)
    assert data["event"] == "incident.opened"
    assert data["incident"]["cause"] == "link_across"
    assert data["incident"]["entries"] == [1, 2]
    assert SECRET not in body.decode()


@pytest.mark.parametrize("code", [302, 404, 500])
def test_an_answer_that_is_no_success_is_an_error_and_no_redirect_is_followed(receiver: Receiver, code: int) -> None:
    receiver.answers = [code]
    with pytest.raises(SendError, match=str(code)):
        Webhook(receiver.url, SECRET, now).send(alert())
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "2852039166", "0xa9fea9fe", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "[fe80::1]"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nothing_is_sent_to_where_machines_keep_their_credentials(scheme: str, host: str) -> None:
    with pytest.raises(SendError, match="where machines keep their credentials"):
        Webhook(f"{scheme}://{host}:9/latest", "s", now_utc).send(alert())


def test_a_server_that_is_not_there_is_an_error_without_the_url() -> None:
    with pytest.raises(SendError, match="cannot be reached") as error:
        Webhook(f"http://127.0.0.1:{free_port()}/token", SECRET, now).send(alert())
    assert "token" not in str(error.value)


@pytest.mark.parametrize(
    "answer", [b"220 mail.example.org\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n"]
)
def test_what_speaks_no_http_does_not_stop_the_delivery(answer: bytes) -> None:
    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=serve, args=(server,))
        thread.start()
        with pytest.raises(SendError, match="does not speak HTTP"):
            Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/x", SECRET, now).send(alert())
        thread.join()


def test_an_address_that_no_mail_can_be_sent_from_does_not_stop_the_delivery(mail: tuple[str, Mailbox]) -> None:
    with pytest.raises(SendError, match="no mail"):
        Mail(mail[0], "a@example.org", "autotune@host\nBcc: b@example.org").send(alert())
    assert mail[1].got == []


def test_a_mail_says_what_is_wrong_and_is_the_same_each_time(mail: tuple[str, Mailbox]) -> None:
    url, box = mail
    Mail(url, "a@example.org, b@example.org", "autotune@example.org").send(alert())
    (envelope,) = box.got
    assert envelope.rcpt_tos == ["a@example.org", "b@example.org"]
    content = envelope.content
    assert isinstance(content, bytes)
    text = content.decode()
    assert "Subject: autotune: slower: link wire across (incident 7)" in text
    assert "Message-ID: <c1-opened@autotune>" in text
    assert "half as fast" in text


def test_a_password_is_not_sent_without_tls(mail: tuple[str, Mailbox]) -> None:
    url, box = mail
    with pytest.raises(SendError, match="no TLS"):
        Mail(url.replace("//", "//me:secret@"), "a@example.org", "b@example.org").send(alert())
    assert box.got == []


def test_each_alert_goes_to_each_channel_once(store: SqlStore, receiver: Receiver, mail: tuple[str, Mailbox]) -> None:
    url, box = mail
    senders = senders_of(
        settings(webhook_url=receiver.url, webhook_secret=SECRET, smtp_url=url, alert_email="a@example.org")
    )
    assert deliver(store, senders) == 0
    assert deliver(store, senders) == 0
    assert (len(receiver.got), len(box.got)) == (1, 1)
    assert deliver_patiently(store, senders) == 0


def test_what_fails_is_tried_again_later_under_the_same_key(store: SqlStore, receiver: Receiver) -> None:
    receiver.answers = [500, 503, 200]
    senders = {AlertChannel.WEBHOOK: Webhook(receiver.url, SECRET, now)}
    moment = now()
    assert deliver(store, senders, clock=lambda: moment) == 1
    assert deliver(store, senders, clock=lambda: moment) == 0  # not yet due again
    early = moment + timedelta(seconds=4.9)
    assert deliver(store, senders, clock=lambda: early) == 0
    assert len(receiver.got) == 1
    moment += timedelta(seconds=5)
    assert deliver(store, senders, clock=lambda: moment) == 1
    early = moment + timedelta(seconds=9.9)
    assert deliver(store, senders, clock=lambda: early) == 0
    assert len(receiver.got) == 2
    moment += timedelta(seconds=10)
    assert deliver(store, senders, clock=lambda: moment) == 0
    assert len({headers[KEY_HEADER] for headers, _ in receiver.got}) == 1
    assert len(receiver.got) == 3
    (left,) = store.due_alerts(moment + timedelta(minutes=2))
    assert left.channel is AlertChannel.EMAIL  # it is not set up here, and waits for who has it


def test_at_some_time_it_is_given_up(store: SqlStore, receiver: Receiver) -> None:
    receiver.answers = [500]
    moment = now()
    for _ in range(25):
        senders = {AlertChannel.WEBHOOK: Webhook(receiver.url, SECRET, now)}
        deliver(store, senders, clock=lambda at=moment: at)  # type: ignore[misc]
        moment += timedelta(hours=7)
    assert len(receiver.got) == 20
    webhook = AlertChannel.WEBHOOK
    (given_up,) = (each for each in store.due_alerts(NEVER) if each.channel is webhook)
    said = "Not told by webhook: incident 1 opened: the webhook answered 500 (20 attempts, given up)"
    assert unsent_line(given_up) == said


def test_a_receiver_that_is_slow_in_any_way_has_until_the_deadline() -> None:
    def fate(scheme: str, drip: bytes) -> str:
        with slow_server(drip) as (port, _):
            url = f"{scheme}://127.0.0.1:{port}"
            slow = Webhook(url, SECRET, now_utc) if scheme == "http" else Mail(url, "a@example.org", "b@example.org")
            with pytest.raises(SendError) as error:
                InTime(slow, deadline_s=3.0).send(alert())
            return str(error.value)

    with ThreadPoolExecutor() as threads:
        fates = threads.map(fate, ("http", "http", "smtp", "smtp"), (b"", b"H", b"", b"2"))
        assert set(fates) == {"it was not taken within 3 s"}


def test_one_that_never_answers_holds_up_neither_the_tuner_nor_another_channel(
    store: SqlStore, mail: tuple[str, Mailbox]
) -> None:
    url, box = mail
    with slow_server(b"") as (port, called):
        hook = f"http://127.0.0.1:{port}"
        senders = senders_of(
            settings(webhook_url=hook, webhook_secret=SECRET, smtp_url=url, alert_email="a@example.org")
        )
        senders[AlertChannel.WEBHOOK] = InTime(Webhook(hook, SECRET, now_utc), deadline_s=AMPLE_S)
        outbox = Outbox(store, senders)
        outbox.send()
        assert called.wait(AMPLE_S)
        outbox.send()
        assert box.arrived.wait(AMPLE_S)
    outbox.join()
    (left,) = store.due_alerts(NEVER)
    assert (left.channel, left.attempts, bool(left.error)) == (AlertChannel.WEBHOOK, 1, True)


def test_settings_are_read_and_their_secrets_not_shown() -> None:
    read = read_settings(
        {
            "AUTOTUNE_WEBHOOK_URL": "https://hooks.example.org/secret-path",
            "AUTOTUNE_WEBHOOK_SECRET": SECRET,
            "AUTOTUNE_SMTP_URL": "smtps://me:hunter2@mail.example.org",
            "AUTOTUNE_ALERT_EMAIL": "a@example.org",
        }
    )
    assert set(senders_of(read)) == set(AlertChannel)
    for hidden in (SECRET, "hunter2", "secret-path"):
        assert hidden not in repr(read)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"webhook_url": "ftp://example.org", "webhook_secret": SECRET}, "AUTOTUNE_WEBHOOK_URL"),
        ({"webhook_url": "https://[::1/hidden", "webhook_secret": SECRET}, "AUTOTUNE_WEBHOOK_URL"),
        ({"webhook_url": "https://example.org/hidden"}, "AUTOTUNE_WEBHOOK_SECRET"),
        ({"smtp_url": "mail.example.org", "alert_email": "a@example.org"}, "AUTOTUNE_SMTP_URL"),
        ({"smtp_url": "smtp://me:hidden@example.org:port", "alert_email": "a@example.org"}, "AUTOTUNE_SMTP_URL"),
        ({"smtp_url": "smtp://example.org", "alert_email": "nobody"}, "AUTOTUNE_ALERT_EMAIL"),
    ],
)
def test_wrong_settings_are_named_and_not_shown(changes: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named) as error:
        senders_of(settings(**changes))
    assert "hidden" not in str(error.value)
