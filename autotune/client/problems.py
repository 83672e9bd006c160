"""Problem documents (RFC 9457) as the exceptions that the library itself would raise."""

from __future__ import annotations

from typing import Any, NoReturn

import httpx

from autotune.errors import (
    AccessError,
    InputError,
    MissingMeasurementError,
    NothingFitsError,
    ServerError,
    StoreConflictError,
)


def raise_problem(response: httpx.Response) -> NoReturn:
    """Raises what an answer of 400 or more says. The response must have been read."""
    data = _document(response)
    detail = str(data.get("detail") or f"{response.url} answered {response.status_code}")
    status = response.status_code
    if status in {401, 403}:
        raise AccessError(f"{detail} (the key comes from $AUTOTUNE_API_KEY)")
    if status == 429 or status >= 500:
        raise ServerError(detail)
    if "misses" in data:
        raise NothingFitsError(detail, data["misses"])
    kind = str(data.get("type", "")).rpartition(":")[2]
    if kind == "missing-measurement":
        raise MissingMeasurementError(detail)
    if "what" in data:
        raise _told(detail, str(data["what"]), data.get("value"), str(data.get("allowed", "")))
    if status == 409:
        raise StoreConflictError(detail)
    raise _told(detail, "request", None, "")


def _told(detail: str, what: str, value: object, allowed: str) -> InputError:
    """An InputError in the server's words."""
    error = InputError(what, value, allowed)
    error.args = (detail,)
    return error


def _document(response: httpx.Response) -> dict[str, Any]:
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return {}
    try:
        data = response.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
