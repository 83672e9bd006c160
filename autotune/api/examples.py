"""Examples of the OpenAPI document. Tests parse each with the record that it is an example of."""

from __future__ import annotations

from typing import Any

_URN = "urn:autotune:problem:"
_TIME = "2026-05-04T03:02:01.123456+00:00"
_PLAN: dict[str, Any] = {
    "tp": 2, "pp": 1, "dp": 4, "cp": 1, "ep": 1, "vpp": 1, "micro_batch": 1, "zero_stage": 1, "recompute": "none",
    "sequence_parallel": False, "schedule": "1f1b",
}  # fmt: skip
_WORKLOAD = {"seq_len": 128, "global_batch": 16, "dtype": "fp32", "grad_dtype": "fp32", "optimizer": "adamw"}
_MODEL: dict[str, Any] = {
    "name": "mine-7b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True,
    "vocab": 32000, "tied": False, "norm": "rmsnorm",
}  # fmt: skip
_DEVICE = {
    "name": "a100-80gb-sxm",
    "kind": "cuda",
    "memory_bytes": 85899345920,
    "peak_flops_per_s": {"bf16": 3.12e14, "fp32": 1.56e14},
}
_CLUSTER: dict[str, Any] = {
    "name": "blue",
    "nodes": 2,
    "gpus_per_node": 8,
    "device": _DEVICE,
    "intra": {"name": "nvlink3", "bytes_per_s": 3e11},
    "inter": {"name": "hdr", "bytes_per_s": 2.5e10},
    "nics_per_node": 8,
}

TUNING_REQUESTS: dict[str, Any] = {
    "by name": {"value": {"model": "llama3-8b", "cluster": "blue"}},
    "everything": {
        "value": {
            "model": _MODEL,
            "cluster": "blue",
            "nodes": 1,
            "workload": {"seq_len": 4096, "global_batch": 128, "dtype": "bf16"},
            "space": {"tp": [1, 2, 4, 8], "zero_stage": [0, 1]},
            "budget": {"gpu_s": 7200.0, "max_trials": 40},
        }
    },
}
MODELS: dict[str, Any] = {"a model": {"value": _MODEL}}
CLUSTERS: dict[str, Any] = {"a cluster": {"value": _CLUSTER}}
QUARANTINES: dict[str, Any] = {"a reason": {"value": {"reason": "its fan is broken"}}}
KEYS: dict[str, Any] = {"a key": {"value": {"name": "ci", "role": "submit", "expires_days": 90}}}

_ROW: dict[str, Any] = {
    "tuning": "3f2a9c41d07b", "created_at": _TIME, "model": "tiny", "cluster": "blue", "state": "searching",
    "message": "", "trials": 7, "gpu_s_spent": 310.5, "plan": _PLAN, "tokens_per_s_per_gpu": 5120.25, "pool": "blue",
    "principal": "ci",
}  # fmt: skip
_KEY: dict[str, Any] = {
    "id": "9b1f0c5e77aa", "name": "ci", "role": "submit", "created_at": _TIME, "expires_at": None, "revoked_at": None,
}  # fmt: skip

ANSWERS: dict[str, Any] = {
    "TuningPage": {"tunings": [_ROW], "next": "/tunings?limit=1&after=3f2a9c41d07b"},
    "Health": {"status": "ok", "database": "ok", "broker": "ok"},
    "KeyPage": {"keys": [_KEY], "next": None},
    "KeyCreated": {"key": _KEY, "secret": "autotune_" + "x" * 43},
    "ApiKey": _KEY | {"revoked_at": _TIME},
    "NodeChanged": {"node": "blue-07", "state": "quarantined", "reason": "its fan is broken (by ops)"},
    "ModelSpec": _MODEL,
    "ClusterSpec": _CLUSTER,
    "ClusterPage": {"clusters": [_CLUSTER], "next": None},
    "ModelPage": {"models": [{"origin": "stored", **_MODEL}], "next": None},
    "TrialPage": {
        "trials": [
            {
                "number": 0, "plan": _PLAN, "state": "complete", "failure": None, "tokens_per_s_per_gpu": 5120.25,
                "interval": [5080.0, 5161.5], "step_time_s": 0.1, "t_calc_s": 0.07, "t_comm_s": 0.04,
                "t_comm_exposed_s": 0.02, "mu": 0.57, "peak_allocated_bytes": 734003200,
                "peak_reserved_bytes": 838860800, "estimate": None, "gpu_s": 24.0, "setup_s": 0.4, "fingerprint": "",
            }
        ],
        "next": None,
    },
}  # fmt: skip


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
    422: _problem(
        422, "input", "Unprocessable Content", "body: space.tp.0: 'two' cannot be used; a valid integer is needed",
        what="body: space.tp.0", value="two", allowed="a valid integer is needed",
    ),
    429: _problem(429, "too-many-requests", "Too Many Requests", "more than 3000 per 1 minute: wait 12 s"),
    500: _problem(500, "internal", "Internal Server Error", "something went wrong here; the log of the API says what"),
    503: _problem(503, "database", "Service Unavailable", "the database cannot be used at the moment"),
}  # fmt: skip
