"""Links of the OpenAPI document: what else can be asked with a value of an answer, and of which operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Links = Mapping[str, Any]


def _links(parameter: str, place: str, *operations: str) -> Links:
    """Links to operations that take, as `parameter`, what stands at `place` (a JSON pointer) of the answer."""
    value = f"$response.body#{place}"
    return {
        name: {
            "operationId": name,
            "parameters": {parameter: value},
            "description": f"`{place}` is the `{parameter}` of `{name}`.",
        }
        for name in operations
    }


_OF_A_TUNING: Sequence[str] = ("list_trials", "stream_events", "cancel_tuning")

LINKS: Mapping[str, Links] = {
    "POST /tunings": _links("tuning_id", "/tuning", "show_tuning", *_OF_A_TUNING),
    "GET /tunings": _links("tuning_id", "/tunings/0/tuning", "show_tuning", *_OF_A_TUNING),
    "GET /tunings/{tuning_id}": _links("tuning_id", "/tuning", *_OF_A_TUNING),
    "POST /models": _links("name", "/name", "show_model"),
    "GET /models": _links("name", "/models/0/name", "show_model"),
    "POST /clusters": _links("name", "/name", "show_cluster"),
    "GET /clusters": _links("name", "/clusters/0/name", "show_cluster"),
    "GET /nodes": _links("name", "/nodes/0/name", "show_node", "quarantine_node", "release_node", "forget_node"),
    "POST /nodes/{name}/quarantine": _links("name", "/node", "show_node", "release_node"),
    "POST /nodes/{name}/release": _links("name", "/node", "show_node", "quarantine_node"),
    "POST /keys": _links("key_id", "/key/id", "revoke_key"),
    "GET /keys": _links("key_id", "/keys/0/id", "revoke_key"),
}
"""Links of the good answers of each route, by the name of the operation that they lead to."""
