"""What an alert says, and where it goes: a signed POST to a webhook, or e-mail through an SMTP server."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import pickle
import signal
import smtplib
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from email.message import EmailMessage, Message
from functools import partial
from ipaddress import ip_address, ip_network
from typing import IO, Any, Protocol
from urllib.parse import unquote, urlsplit

from autotune.errors import InputError
from autotune.settings import ALERT_EMAIL_VARIABLE, SMTP_VARIABLE, WEBHOOK_SECRET_VARIABLE, WEBHOOK_VARIABLE
from autotune.specs.regression import Alert, AlertEvent

MAX_SUBJECT = 120
SEND_DEADLINE_S = 10.0
"""How long sending one alert may take in all: finding the address, connecting, writing, and reading the answer."""


_START_S = 60.0
"""A process to send may take this long to start, on a machine that is busy measuring; the deadline counts from then."""


class SendError(Exception):
    """An alert was not taken. The text holds no secret."""


class Sender(Protocol):
    """One channel."""

    def send(self, alert: Alert) -> None:
        """Sends one alert. Raises SendError."""


class InTime:
    """Sends in a process of its own, which ends itself at the deadline, also when nobody waits for it any more.

    Timeouts of sockets begin anew with every byte, and looking up a name has none: a receiver that sends a byte a
    second would hold its sender for ever.

    Args:
        sender: does the sending; it is pickled.
        deadline_s: for one alert, in seconds.
    """

    def __init__(self, sender: Sender, deadline_s: float = SEND_DEADLINE_S) -> None:
        self._sender, self._deadline_s = sender, deadline_s

    def send(self, alert: Alert) -> None:
        """Sends one alert. Raises SendError, at the deadline at the latest."""
        task = pickle.dumps((self._sender, alert, self._deadline_s))
        command = [sys.executable, "-P", "-c", f"from {__name__} import send_here; send_here()"]
        within_s = _START_S + self._deadline_s
        try:
            # A session of its own: a tuner's yields to all others, and this has little to do.
            ended = subprocess.run(
                command, input=task, capture_output=True, timeout=within_s, check=False, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise SendError(f"the process that was to send it took over {within_s:g} s") from None
        except OSError as error:
            raise SendError(f"no process could be started to send it: {error.strerror}") from None
        if ended.returncode == -signal.SIGALRM:
            raise SendError(f"it was not taken within {self._deadline_s:g} s")
        if ended.returncode:
            raise SendError(ended.stdout.decode() or f"the process that was to send it ended with {ended.returncode}")


def send_here() -> None:
    """What InTime's process does: sends the alert on its standard input; says why not, and exits with 1."""
    sender, alert, deadline_s = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        sender.send(alert)
    except SendError as error:
        sys.stdout.write(str(error))
        sys.exit(1)


def payload(alert: Alert) -> dict[str, Any]:
    """The JSON object of a webhook. Fields are only ever added."""
    incident = alert.incident
    return {
        "version": 1,
        "key": alert.key,
        "event": f"incident.{alert.event}",
        "at": alert.at.isoformat(),
        "incident": {
            "id": incident.id,
            "cause": incident.kind.value,
            "subject": incident.subject,
            "message": incident.message,
            "opened_at": incident.opened_at.isoformat(),
            "recovered_at": incident.recovered_at.isoformat() if incident.recovered_at else None,
            "entries": list(incident.entries),
            "check": incident.check_id,
        },
    }


def headline(alert: Alert) -> str:
    """One line."""
    incident = alert.incident
    what = incident.subject or incident.kind.value.replace("_", " ")
    verb = "recovered" if alert.event is AlertEvent.RECOVERED else "slower"
    line = " ".join(f"autotune: {verb}: {what} (incident {incident.id})".split())
    return line if len(line) <= MAX_SUBJECT else line[: MAX_SUBJECT - 3] + "..."


def text(alert: Alert) -> str:
    """The body of an e-mail."""
    incident = alert.incident
    lines = [
        headline(alert),
        "",
        f"What was found: {incident.message}",
        f"Cause:          {incident.kind.value.replace('_', ' ')}",
        f"Opened at:      {incident.opened_at:%Y-%m-%d %H:%M:%S} UTC",
    ]
    if incident.recovered_at is not None:
        lines.append(f"Recovered at:   {incident.recovered_at:%Y-%m-%d %H:%M:%S} UTC")
    entries = ", ".join(str(entry) for entry in incident.entries)
    lines += [f"Entries:        {entries}", f"Check:          {incident.check_id}", ""]
    return "\n".join(lines) + "More: autotune regress history, autotune regress report\n"


# Webhooks: a signed POST of one JSON object.
#
# Headers: `Autotune-Signature: t=SECONDS,v1=HEX`, where HEX is HMAC-SHA256 under the shared secret over the bytes
# `SECONDS.BODY`, and `Idempotency-Key`, the same for every attempt at one alert. A receiver compares the signature in
# constant time, refuses timestamps that are minutes old, and drops a key that it has seen.

SIGNATURE_HEADER, KEY_HEADER = "Autotune-Signature", "Idempotency-Key"


def signature(secret: str, body: bytes, seconds: int) -> str:
    """The value of the signature header."""
    digest = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: a signed body is sent to nobody but the one who was named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follows nothing."""


_METADATA = tuple(map(ip_network, ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "100.100.100.200/32")))
"""Where clouds answer a machine with its credentials; no receiver of ours is there."""


def _connect(address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
    """A connection to a host and port, whatever name led there, but to none of _METADATA. Raises OSError."""
    error: OSError = OSError("its name has no address")
    for *_, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        there = ip_address(str(found[0]).partition("%")[0])
        if any((getattr(there, "ipv4_mapped", None) or there) in each for each in _METADATA):
            raise OSError(f"{there} is where machines keep their credentials")
        try:
            return socket.create_connection((str(found[0]), int(found[1])), timeout, source_address)
        except OSError as tried:
            error = tried
    raise error


class _Http(urllib.request.HTTPHandler):
    """http:// by way of _connect."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """The answer."""
        return self.do_open(partial(_guarded, http.client.HTTPConnection), req)


class _Https(urllib.request.HTTPSHandler):
    """https:// by way of _connect."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """The answer."""
        return self.do_open(partial(_guarded, http.client.HTTPSConnection), req)


def _guarded(kind: type[http.client.HTTPConnection], host: str, **options: Any) -> http.client.HTTPConnection:
    made = kind(host, **options)
    made._create_connection = _connect  # type: ignore[attr-defined]  # what both kinds connect with
    return made


class Webhook:
    """Sends alerts to one URL.

    Args:
        url: http:// or https://.
        secret: shared with the receiver.
        clock: the present moment.

    Raises:
        InputError: another kind of URL, or no secret.
    """

    def __init__(self, url: str, secret: str, clock: Callable[[], datetime]) -> None:
        if not url.startswith(("http://", "https://")) or not _has_host(url):
            raise InputError(WEBHOOK_VARIABLE, url.partition("://")[0], "an http:// or https:// URL")
        if not secret:
            raise InputError(WEBHOOK_SECRET_VARIABLE, None, f"{WEBHOOK_VARIABLE} needs a secret to sign with")
        self._url, self._secret, self._clock = url, secret, clock

    def send(self, alert: Alert) -> None:
        """Sends one alert. Raises SendError unless the answer is 2xx."""
        body = json.dumps(payload(alert), sort_keys=True).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "autotune",
            SIGNATURE_HEADER: signature(self._secret, body, int(self._clock().timestamp())),
            KEY_HEADER: alert.key,
        }
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirects(), _Http(), _Https()).open(request, timeout=SEND_DEADLINE_S):
                pass
        except urllib.error.HTTPError as error:
            with error:
                raise SendError(f"the webhook answered {error.code}") from None
        except (OSError, ValueError) as error:
            raise SendError(f"the webhook cannot be reached: {_reason(error)}") from None
        except http.client.HTTPException as error:  # what answers speaks no HTTP: no OSError
            raise SendError(f"the webhook does not speak HTTP: {type(error).__name__}") from None


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _reason(error: Exception) -> Any:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__


PORTS = {"smtp": 25, "smtps": 465}


class Mail:
    """Sends alerts by e-mail.

    Args:
        url: smtp://[USER:PASSWORD@]HOST[:PORT] or smtps://...; a password goes over TLS only.
        recipients: addresses, separated by commas.
        sender: address that they come from.

    Raises:
        InputError: another kind of URL, or no recipient.
    """

    def __init__(self, url: str, recipients: str, sender: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or PORTS.get(parts.scheme, 0)
        except ValueError:
            raise InputError(SMTP_VARIABLE, "not shown", "smtp://[USER:PASSWORD@]HOST[:PORT]") from None
        if parts.scheme not in PORTS or not parts.hostname:
            raise InputError(SMTP_VARIABLE, parts.scheme, "smtp://[USER:PASSWORD@]HOST[:PORT], or smtps://")
        to = [each.strip() for each in recipients.split(",") if each.strip()]
        if not to or not all("@" in each and "\n" not in each for each in to):
            raise InputError(ALERT_EMAIL_VARIABLE, recipients, "addresses, separated by commas")
        self._tls, self._host, self._port = parts.scheme == "smtps", parts.hostname, port
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        self._to, self._sender = to, sender

    def send(self, alert: Alert) -> None:
        """Sends one alert. Raises SendError if the server does not take it."""
        try:
            with self._connect() as server:
                if not self._tls and server.has_extn("starttls"):
                    server.starttls(context=ssl.create_default_context())
                    server.ehlo()
                elif self._user and not self._tls:
                    raise SendError("the mail server offers no TLS, and a password is not sent without")
                if self._user:
                    server.login(self._user, self._password)
                server.send_message(self._message(alert), self._sender, self._to)
        except smtplib.SMTPException as error:
            raise SendError(f"the mail server refused: {type(error).__name__}") from None
        except ValueError as error:  # a sender, recipient or password that a mail server cannot be told
            raise SendError(f"no mail can be made of this: {type(error).__name__}") from None
        except OSError as error:
            raise SendError(f"the mail server cannot be reached: {error.strerror or type(error).__name__}") from None

    def _connect(self) -> smtplib.SMTP:
        if self._tls:
            context = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=SEND_DEADLINE_S, context=context)
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=SEND_DEADLINE_S)
        server.ehlo()
        return server

    def _message(self, alert: Alert) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = headline(alert)
        message["From"] = self._sender
        message["To"] = ", ".join(self._to)
        message["Date"] = alert.at
        message["Message-ID"] = f"<{alert.key}@autotune>"  # a mail that comes twice is shown once
        message.set_content(text(alert))
        return message
