"""Examples of requests and errors, for the OpenAPI document; answers are in api.answer_examples.

Tests hold each against its schema.
"""

from __future__ import annotations

from typing import Any

_URN = "urn:autotune:problem:"
MODEL: dict[str, Any] = {
    "name": "mine-7b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True,
    "vocab": 32000, "tied": False, "norm": "rmsnorm",
}  # fmt: skip
DEVICE = {
    "name": "a100-80gb-sxm",
    "kind": "cuda",
    "memory_bytes": 85899345920,
    "memory_bytes_per_s": 2.039e12,
    "peak_flops_per_s": {"bf16": 3.12e14, "fp32": 1.56e14},
}
CLUSTER: dict[str, Any] = {
    "name": "blue",
    "nodes": 2,
    "gpus_per_node": 8,
    "device": DEVICE,
    "intra": {"name": "nvlink3", "bytes_per_s": 3e11},
    "inter": {"name": "hdr", "bytes_per_s": 2.5e10},
    "nics_per_node": 8,
}

TUNING_REQUESTS: dict[str, Any] = {
    "by name": {"value": {"model": "llama3-8b", "cluster": "blue"}},
    "everything": {
        "value": {
            "model": MODEL,
            "cluster": "blue",
            "nodes": 1,
            "workload": {"seq_len": 4096, "global_batch": 128, "dtype": "bf16"},
            "space": {"tp": [1, 2, 4, 8], "zero_stage": [0, 1]},
            "budget": {"gpu_s": 7200.0, "max_trials": 40},
        }
    },
}
MODELS: dict[str, Any] = {"a model": {"value": MODEL}}
CLUSTERS: dict[str, Any] = {"a cluster": {"value": CLUSTER}}
QUARANTINES: dict[str, Any] = {"a reason": {"value": {"reason": "its fan is broken"}}}
KEYS: dict[str, Any] = {"a key": {"value": {"name": "ci", "role": "submit", "expires_days": 90}}}


def _problem(status: int, kind: str, title: str, detail: str, **members: Any) -> dict[str, Any]:
    return {"type": _URN + kind, "title": title, "status": status, "detail": detail, **members}


PROBLEMS: dict[int, dict[str, Any]] = {
    400: _problem(400, "malformed", "Bad Request", "the body is not JSON: Expecting value", what="body"),
    401: _problem(401, "unauthorized", "Unauthorized", "this key has expired"),
    403: _problem(403, "forbidden", "Forbidden", "this needs the role admin, and ci has submit"),
    404: _problem(
        404, "not-found", "Not Found", "tuning: 'beef' cannot be used; known: 3f2a9c41d07b",
        what="tuning", value="beef", allowed="known: 3f2a9c41d07b",
    ),
    409: _problem(409, "conflict", "Conflict", "this idempotency key came with another request before"),
    413: _problem(413, "content-too-large", "Content Too Large", "a body of at most 1048576 bytes is taken"),
    415: _problem(
        415, "unsupported-media-type", "Unsupported Media Type", "send JSON with Content-Type: application/json"
    ),
    422: _problem(
        422, "input", "Unprocessable Content", "body: space.tp.0: 'two' cannot be used; a valid integer is needed",
        what="body: space.tp.0", value="two", allowed="a valid integer is needed",
    ),
    429: _problem(429, "too-many-requests", "Too Many Requests", "more than 3000 per 1 minute: wait 12 s"),
    500: _problem(500, "internal", "Internal Server Error", "something went wrong here; the log of the API says what"),
    503: _problem(503, "database", "Service Unavailable", "the database cannot be used at the moment"),
}  # fmt: skip
