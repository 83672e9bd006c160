"""The OpenAPI document: FastAPI's, with our problem documents, keys and examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from autotune.api.access import ROLES
from autotune.api.answers import Problem
from autotune.api.examples import ANSWERS, LINKS, PROBLEMS, Links
from autotune.api.problems import MEDIA_TYPE, TITLES
from autotune.specs import Spec, TuningEvent

Responses = dict[int | str, dict[str, Any]]

_WAIT = {"Retry-After": "Seconds to wait before asking again."}
ALWAYS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "How to show a key (RFC 6750)."},
    415: {"Accept": "What is understood."},
    429: _WAIT,
    503: _WAIT,
}
"""Headers that an error of this status always has."""

DESCRIPTION = """\
Finds, by measuring, the hybrid-parallel plan that trains a model fastest on a cluster.

Keys: `Authorization: Bearer KEY`, made by `autotune keys create` or POST /keys. A key has one of the roles read, submit
and admin, each of which may do what those before it may. Lists come in pages: `next` is the path of the next one, or
null. Errors are problem documents (RFC 9457).
"""


def answer(status: int, shape: type[Spec], headers: Mapping[str, str] = MappingProxyType({})) -> Responses:
    """A good answer of a route: its shape, and headers that it always has, each with what it says."""
    described = {"headers": {name: _header(text) for name, text in headers.items()}} if headers else {}
    return {status: {"model": shape, "description": _first_line(shape), **described}}


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
    for shape in (Problem, TuningEvent):  # of answers that no handler returns
        schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {shape.__name__: schema}
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
    """Adds what every route of its kind may answer, and where its answers lead."""
    route = next(route for route in ROLES if route.replace(":path}", "}") == f"{method} {path}")
    role, statuses = ROLES[route], [429, 500, 503]
    if role is not None:
        statuses += [401, 403]
        operation["security"] = [{"key": []}]
        operation["needs"] = f"\n\nNeeds the role `{role.value}`."
    if "requestBody" in operation:
        statuses += [400, 413, 415, 422]
    if "parameters" in operation:
        statuses += [422]
        operation["parameters"] = [_given(parameter) for parameter in operation["parameters"]]
    summary, _, rest = operation["description"].partition("\n")
    operation |= {"summary": summary.rstrip("."), "description": (rest.strip() or summary) + operation.pop("needs", "")}
    operation["responses"].pop("422", None)
    for status, good in operation["responses"].items():
        if status in {"200", "201"}:
            _complete_answer(good, LINKS.get(f"{method} {path}", {}))
    operation["responses"] |= {str(status): _problem(status) for status in sorted(set(statuses))}


def _complete_answer(good: dict[str, Any], links: Links) -> None:
    """Adds links, the header of pages, and examples; FastAPI would leave out what is null in those."""
    if links:
        good["links"] = dict(links)
    content = good["content"].get("application/json", {"schema": {}})
    shapes = [
        each["$ref"].rpartition("/")[2]
        for each in content["schema"].get("anyOf", [content["schema"]])
        if "$ref" in each
    ]
    if len(shapes) == 1:
        content["example"] = ANSWERS[shapes[0]]
        if shapes[0].endswith("Page"):
            good["headers"] = {"Link": _header('The next page, as <PATH>; rel="next" (RFC 8288).', required=False)}
    elif shapes:
        content["examples"] = {name: {"value": ANSWERS[name]} for name in shapes}


def _given(parameter: dict[str, Any]) -> dict[str, Any]:
    """A parameter as it is where it is given: null, which means that it is absent, cannot be sent."""
    schema = parameter["schema"]
    some = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if len(some) == 1:
        parameter["schema"] = {name: value for name, value in schema.items() if name != "anyOf"} | some[0]
    return parameter


def _problem(status: int) -> dict[str, Any]:
    content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": PROBLEMS[status]}
    headers = {"headers": {name: _header(text) for name, text in ALWAYS[status].items()}} if status in ALWAYS else {}
    return {"description": TITLES[status], "content": {MEDIA_TYPE: content}, **headers}


def _header(text: str, *, required: bool = True) -> dict[str, Any]:
    return {"description": text, "required": required, "schema": {"type": "string"}}


def _first_line(shape: type[Spec]) -> str:
    return (shape.__doc__ or shape.__name__).strip().splitlines()[0]
