"""E-mail through an SMTP server, with TLS where the server or the URL says so."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

from autotune.alerts.texts import headline, text
from autotune.alerts.webhook import SendError
from autotune.errors import InputError
from autotune.settings import ALERT_EMAIL_VARIABLE, SMTP_VARIABLE
from autotune.specs.regression import Alert

PORTS = {"smtp": 25, "smtps": 465}
TIMEOUT_S = 15.0


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
            server: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=TIMEOUT_S, context=context)
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=TIMEOUT_S)
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
