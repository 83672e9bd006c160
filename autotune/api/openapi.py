"""The OpenAPI document: FastAPI's, with our problem documents, keys and examples."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from autotune.api.answers import Problem
from autotune.api.examples import ANSWERS, PROBLEMS
from autotune.api.problems import MEDIA_TYPE, TITLES
from autotune.api.roles import ROLES
from autotune.specs import Spec

Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = """\
Finds, by measuring, the hybrid-parallel plan that trains a model fastest on a cluster.

Keys: `Authorization: Bearer KEY`, made by `autotune keys create` or POST /keys. A key has one of the roles read, submit
and admin, each of which may do what those before it may. Lists come in pages: `next` is the path of the next one, or
null. Errors are problem documents (RFC 9457).
"""


def answer(status: int, shape: type[Spec]) -> Responses:
    """A good answer of a route: its shape, and an example where we have one."""
    content = {"application/json": {"example": ANSWERS[shape.__name__]}} if shape.__name__ in ANSWERS else {}
    return {status: {"model": shape, "description": _first_line(shape), "content": content}}


def either(status: int, one: type[Spec], other: type[Spec]) -> Responses:
    """A good answer of a route that has one of two shapes."""
    return {status: {"model": one | other, "description": f"{_first_line(one)} Or: {_first_line(other)}"}}


def problems(*statuses: int) -> Responses:
    """Errors of a route beside those that every route may have."""
    return {status: _problem(status) for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of an app, made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _complete(
            get_openapi(
                title="autotune",
                version=version("autotune"),
                summary="A profiler-driven auto-tuner for hybrid-parallel training.",
                description=DESCRIPTION,
                routes=app.routes,
                license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
            )
        )
    return app.openapi_schema


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = Problem.model_json_schema()
    found["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key, as `autotune keys create` shows it."}
    }
    for method, path, operation in _operations(found):
        _complete_operation(method, path, operation)
    return found


def _operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in found["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def _complete_operation(method: str, path: str, operation: dict[str, Any]) -> None:
    """Adds what every route of its kind may answer."""
    role = next(role for route, role in ROLES.items() if route.replace(":path}", "}") == f"{method} {path}")
    statuses = [500, 503]
    if role is not None:
        statuses += [401, 403, 429]
        operation["security"] = [{"key": []}]
        operation["needs"] = f"\n\nNeeds the role `{role.value}`."
    if "requestBody" in operation:
        statuses += [400, 413, 422]
    if "parameters" in operation:
        statuses += [422]
    summary, _, rest = operation["description"].partition("\n")
    operation |= {"summary": summary.rstrip("."), "description": (rest.strip() or summary) + operation.pop("needs", "")}
    operation["responses"].pop("422", None)
    operation["responses"] |= {str(status): _problem(status) for status in sorted(set(statuses))}


def _problem(status: int) -> dict[str, Any]:
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": PROBLEMS[status]}
    return {"description": TITLES[status], "content": {MEDIA_TYPE: content}}


def _first_line(shape: type[Spec]) -> str:
    return (shape.__doc__ or shape.__name__).strip().splitlines()[0]
