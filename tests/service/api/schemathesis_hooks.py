"""Loaded by schemathesis: keeps it from its own key, and what it does by links from leading nowhere."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import schemathesis
from schemathesis.generation.meta import TestPhase

NARROWING = ("after", "pool", "principal", "state")
NUMBERS = count(1)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Changes a request just before it is sent."""
    if case.operation.label == "DELETE /keys/{key_id}" and case.path_parameters["key_id"] == os.environ["OWN_KEY"]:
        case.path_parameters["key_id"] = "nobody"
    if case.meta is None or case.meta.phase.name is not TestPhase.STATEFUL or not case.meta.generation.mode.is_positive:
        return
    # Of a random space no plan is legal, and after a random name there is no further item: nothing would follow. And
    # what is asked for again has another answer, which is not what a replay expects.
    if case.operation.label == "POST /tunings":
        for name in ("space", "nodes"):
            case.body.pop(name, None)
        case.body["seed"] = next(NUMBERS)
    if case.operation.label == "POST /keys":
        case.body["name"] = f"key {next(NUMBERS)}"
    if case.method == "GET":
        for name in NARROWING:
            case.query.pop(name, None)
