"""Webhooks: a signed POST of one JSON object.

Headers: `Autotune-Signature: t=SECONDS,v1=HEX`, where HEX is HMAC-SHA256 under the shared secret over the bytes
`SECONDS.BODY`, and `Idempotency-Key`, the same for every attempt at one alert. A receiver compares the signature in
constant time, refuses timestamps that are minutes old, and drops a key that it has seen.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from email.message import Message
from typing import IO, Any
from urllib.parse import urlsplit

from autotune.alerts.texts import payload
from autotune.errors import InputError
from autotune.settings import WEBHOOK_SECRET_VARIABLE, WEBHOOK_VARIABLE
from autotune.specs.regression import Alert

SIGNATURE_HEADER, KEY_HEADER = "Autotune-Signature", "Idempotency-Key"
TIMEOUT_S = 10.0


class SendError(Exception):
    """An alert was not taken. The text holds no secret."""


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
        self._opener = urllib.request.build_opener(_NoRedirects())

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
            with self._opener.open(request, timeout=TIMEOUT_S):
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
