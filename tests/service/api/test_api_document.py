"""The OpenAPI document: complete, true, and held against the running API by schemathesis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_server import TINY, Api, StartApi
from jsonschema_rs import Draft202012Validator

from autotune.api import answers, events, known_answers
from autotune.api.access import ROLES
from autotune.api.application import create_app
from autotune.api.examples import ANSWERS, CLUSTERS, KEYS, LINKS, MODELS, PROBLEMS, QUARANTINES, TUNING_REQUESTS
from autotune.api.requests import KeyRequest, QuarantineRequest, TuningRequest
from autotune.specs import ClusterSpec, ModelSpec, Role


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(None, None, broker_answers=bool).openapi()  # type: ignore[arg-type]


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{method} {path}", item) for path, each in document["paths"].items() for method, item in each.items()]


def test_every_route_is_described(document: dict[str, Any]) -> None:
    assert len(operations(document)) == len(ROLES)
    for route, operation in operations(document):
        for name in ("summary", "description", "operationId", "tags"):
            assert operation[name], (route, name)
        good = [operation["responses"][status] for status in ("200", "201") if status in operation["responses"]]
        assert good, route
        for answer in good:
            (content,) = answer["content"].values()
            assert content["schema"], route


def test_every_error_is_a_problem_with_an_example(document: dict[str, Any]) -> None:
    for route, operation in operations(document):
        errors = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
        expected = {"429", "500", "503"} | ({"401", "403"} if operation.get("security") else set())
        assert expected <= set(errors), route
        for status, answer in errors.items():
            (media_type,) = answer["content"]
            assert media_type == "application/problem+json"
            content = answer["content"][media_type]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert content["example"]["status"] == int(status)


def test_every_parameter_and_body_is_described(document: dict[str, Any]) -> None:
    for route, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (route, parameter["name"])
        for body in operation.get("requestBody", {}).get("content", {}).values():
            assert body["schema"], route
            assert body.get("examples"), route


def examples(content: dict[str, Any]) -> list[Any]:
    """The examples of one media type."""
    return [content["example"]] if "example" in content else [each["value"] for each in content["examples"].values()]


def test_every_body_and_every_answer_has_an_example_that_its_schema_allows(document: dict[str, Any]) -> None:
    for route, operation in operations(document):
        assert set(operation["responses"]) & {"200", "201"}, route
        for described in (operation.get("requestBody", {}), *operation["responses"].values()):
            for content in described.get("content", {}).values():
                schema = Draft202012Validator({**content["schema"], "components": document["components"]})
                for example in examples(content):
                    schema.validate(example)


def test_the_examples_are_what_our_records_take() -> None:
    for name, example in ANSWERS.items():
        (shape,) = {getattr(room, name) for room in (answers, known_answers) if hasattr(room, name)}
        shape.from_data(example, name)
    for example in PROBLEMS.values():
        answers.Problem.from_data(example)
    for shape, named in (
        (TuningRequest, TUNING_REQUESTS),
        (ModelSpec, MODELS),
        (ClusterSpec, CLUSTERS),
        (KeyRequest, KEYS),
        (QuarantineRequest, QUARANTINES),
    ):
        for example in named.values():
            shape.from_data(example["value"])


def test_links_lead_to_operations_that_take_what_they_give(document: dict[str, Any]) -> None:
    parameters = {
        operation["operationId"]: {each["name"] for each in operation.get("parameters", ())}
        for _, operation in operations(document)
    }
    found = 0
    for route, operation in operations(document):
        for status in {"200", "201"} & set(operation["responses"]):
            good = operation["responses"][status]
            for name, link in good.get("links", {}).items():
                (parameter,) = link["parameters"]
                assert parameter in parameters[link["operationId"]], (route, name)
                value = example_at(good["content"]["application/json"]["example"], link["parameters"][parameter])
                assert isinstance(value, str), (route, name)
                found += 1
    assert found > len(LINKS)


def example_at(example: Any, expression: str) -> Any:
    """What a runtime expression of a link finds in an example."""
    for part in expression.removeprefix("$response.body#/").split("/"):
        example = example[int(part)] if isinstance(example, list) else example[part]
    return example


def test_the_document_is_served_to_everybody(api: Api, document: dict[str, Any]) -> None:
    assert api.request("GET", "/openapi.json", None).json() == document


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_schemathesis_finds_nothing(start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated requests, valid and not, against every route; answers are compared with the document.

    All phases and checks; schemathesis.toml says what of a check is not asked for, and why.
    """
    for name in ("LONGEST_S", "POLL_S"):  # a stream of events would last as long as its tuning
        monkeypatch.setattr(events, name, 0.0)
    api = start_api(rate="100000/second")
    api.request("POST", "/tunings", json=TINY)
    (own,) = api.store.keys()
    program = Path(sys.executable).parent / "schemathesis"
    here = Path(__file__).parent
    options = ["--header", f"Authorization: Bearer {api.secret(Role.ADMIN)}", "--max-response-time", "60", "--no-color"]
    done = subprocess.run(
        [program, "--config-file", here / "schemathesis.toml", "run", f"{api.url}/openapi.json", *options],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(here), "OWN_KEY": own.id},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in ("Examples", "Coverage", "Fuzzing", "Stateful"):
        assert f"✅ {phase}" in done.stdout.partition("= SUMMARY =")[2], done.stdout
    assert api.request("GET", "/tunings").status_code == 200  # with a key that was refused, all would have passed
