"""Every error as a problem document (RFC 9457): what went wrong in words, and which value where we know it.

Our members beside the standard ones: `what`, `value` and `allowed` of an InputError, `misses` of a NothingFitsError.
Never a traceback, a statement of SQL or the place of a database: those go to the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from autotune.errors import (
    AutotuneError,
    IllegalPlanError,
    InputError,
    MissingMeasurementError,
    NothingFitsError,
    StoreAwayError,
    StoreConflictError,
    StoreError,
    UnknownNameError,
)

MEDIA_TYPE = "application/problem+json"
URN = "urn:autotune:problem:"
RETRY_S = 5
LONGEST_VALUE = 200
TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
"""RFC 9110's names; those of Python's http.HTTPStatus change between its releases."""

KINDS = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "content-too-large",
    415: "unsupported-media-type",
    429: "too-many-requests",
    503: "unavailable",
}
"""The kind of a problem that is told by its status alone."""

log = logging.getLogger(__name__)


def problem(status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    """One problem document; members that are None are left out."""
    data: dict[str, Any] = {"type": URN + kind, "title": TITLES[status], "status": status, "detail": detail}
    data |= {name: value for name, value in members.items() if value is not None}
    # Escaped to ASCII, because what a user sent may hold half a surrogate pair.
    return Response(json.dumps(data).encode(), status, headers, MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    """Registers the handlers of everything that is raised on purpose; api.server catches the rest."""
    app.add_exception_handler(AutotuneError, _on_ours)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)


def unexpected(error: Exception, path: str) -> Response:
    """The answer to an error that nobody foresaw; the log has the rest."""
    log.error("unexpected error at %s", path, exc_info=error)
    return problem(500, "internal", "something went wrong here; the log of the API says what")


def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, AutotuneError)
    match error:
        case UnknownNameError() if error.value in request.path_params.values():
            return _input(404, "not-found", error)
        case IllegalPlanError():
            return _input(422, "illegal-plan", error)
        case InputError():
            return _input(422, "input", error)
        case NothingFitsError():
            return problem(422, "nothing-fits", str(error), misses=error.misses)
        case MissingMeasurementError():
            return problem(422, "missing-measurement", str(error))
        case StoreConflictError():
            return problem(409, "conflict", str(error))
        case StoreError():
            if not isinstance(error, StoreAwayError):
                log.error("the database cannot be used: %s", error)
            headers = {"Retry-After": str(RETRY_S)}
            return problem(503, "database", "the database cannot be used at the moment", headers)
        case _:
            return unexpected(error, request.url.path)


def _input(status: int, kind: str, error: InputError) -> Response:
    return problem(
        status, kind, str(error), what=error.what[:LONGEST_VALUE], value=_plain(error.value), allowed=error.allowed
    )


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in {404, 405} and not hasattr(request.state, "principal"):  # no route took it
        try:
            await request.app.state.parts.gate.admit_stray(request)
        except HTTPException as refusal:
            error = refusal
    kind = KINDS.get(error.status_code, "http")
    headers = dict(error.headers or {})
    if error.status_code == 405:
        methods = _methods(request)
        headers["Allow"] = ", ".join(methods)
        return problem(
            405, kind, f"{request.method} is not understood here", headers,
            what="method", value=request.method, allowed=headers["Allow"],
        )  # fmt: skip
    if error.status_code == 404:
        detail = "there is nothing at this path" if error.detail == TITLES[404] else error.detail
        return problem(404, kind, detail, what="path", value=request.url.path[:LONGEST_VALUE])
    return problem(error.status_code, kind, error.detail, headers)


def _methods(request: Request) -> list[str]:
    """What this path understands. Each of our routes has one method, so starlette knows only the first one's."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.path_regex.match(request.scope["path"])]
    return sorted({method for route in fitting for method in route.methods or ()})


def _on_validation(request: Request, error: Exception) -> Response:
    """The first complaint about a path, query, header or body; the number of further ones is told."""
    assert isinstance(error, RequestValidationError)
    first, *rest = error.errors()
    what = ".".join(str(part) for part in first["loc"])[:LONGEST_VALUE]
    allowed = first["msg"] + (f" (and {len(rest)} more)" if rest else "")
    value = None if first["type"] == "missing" else _plain(first.get("input"))
    if first["type"] == "json_invalid":
        return problem(
            400, "malformed", f"the body is not JSON: {first['msg']}", what="body", allowed="a JSON document"
        )
    detail = f"{what}: {value!r} cannot be used; {allowed}"
    return problem(422, "input", detail, what=what, value=value, allowed=allowed)


def _plain(value: object) -> str | int | float | bool | None:
    """A value as a problem repeats it: short, and plain JSON."""
    if value is None or (isinstance(value, (int, float)) and abs(value) < 2**53):
        return value
    text = value if isinstance(value, str) else repr(value)[: 2 * LONGEST_VALUE]
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."
