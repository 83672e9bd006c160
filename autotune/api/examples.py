"""Examples of requests, answers and errors, for the OpenAPI document.

Tests hold each against its schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# Examples of good answers, by their shapes, for the OpenAPI document. Tests hold each against its schema.

_TIME = "2026-05-04T03:02:01.123456+00:00"
_LATER = "2026-05-04T03:09:41.500000+00:00"
_ID, _FINGERPRINT, _ENVIRONMENT = "3f2a9c41d07b", "7d1b0e55c2a94f38", "b40c6d9e12f7a853"
_PLAN: dict[str, Any] = {
    "tp": 2, "pp": 1, "dp": 8, "cp": 1, "ep": 1, "vpp": 1, "micro_batch": 1, "zero_stage": 1, "recompute": "none",
    "sequence_parallel": True, "schedule": "1f1b",
}  # fmt: skip
_OTHER_PLAN = _PLAN | {"tp": 4, "dp": 4}
_WORKLOAD = {"seq_len": 4096, "global_batch": 128, "dtype": "bf16", "grad_dtype": "fp32", "optimizer": "adamw"}
_SPEED: dict[str, Any] = {"tokens_per_s_per_gpu": 3310.5, "interval": [3291.0, 3330.0], "repeats": 3}
_ESTIMATE: dict[str, Any] = {
    "seconds": {
        "compute": 7.9, "tp": 1.2, "ep": 0.0, "cp": 0.0, "pp_p2p": 0.0, "bubble": 0.0, "dp_exposed": 0.3,
        "optimizer": 0.05, "launch": 0.01,
    },
    "bytes": {
        "parameters": 7.2e9, "gradients": 1.44e10, "optimizer": 5.4e9, "activations": 2.1e10, "logits": 5.2e8,
        "buffers": 1.0e9, "gathered": 0.0, "fragmentation": 2.0e9,
    },
    "step_time_s": 9.46, "tokens_per_s_per_gpu": 3463.8, "mfu": 0.46, "peak_memory_bytes": 5.152e10, "worst_stage": 0,
    "fits": True, "basis": "profile", "framework": "torch", "step_time_interval_s": [8.7, 10.3],
    "reserved_bytes": 5.152e10, "allocated_bytes": 4.95e10, "p_fits": 0.99,
}  # fmt: skip
_TRIAL: dict[str, Any] = {
    "number": 0, "plan": _PLAN, "state": "complete", "failure": None, "tokens_per_s_per_gpu": 3310.5,
    "interval": [3291.0, 3330.0], "step_time_s": 9.9, "t_calc_s": 8.1, "t_comm_s": 2.3, "t_comm_exposed_s": 1.8,
    "mu": 0.284, "peak_allocated_bytes": 49392123904, "peak_reserved_bytes": 51539607552, "estimate": _ESTIMATE,
    "gpu_s": 1584.0, "setup_s": 4.5, "fingerprint": _FINGERPRINT,
}  # fmt: skip
_TUNING: dict[str, Any] = {
    "id": _ID, "model": MODEL, "cluster": CLUSTER, "workload": _WORKLOAD, "space": {"tp": [1, 2, 4, 8]},
    "budget": {"gpu_s": 7200.0, "max_trials": 40}, "seed": 0, "cold": False, "sampler": "plan", "pool": "blue",
    "principal": "ci", "state": "searching", "owner": "", "gpu_s_spent": 3168.0, "created_at": _TIME,
    "updated_at": _LATER,
}  # fmt: skip
_SUBMITTED: dict[str, Any] = {
    "tuning": _ID, "created": True, "state": "queued", "message": "", "place": 3,
    "request": _TUNING | {"state": "queued", "gpu_s_spent": 0.0, "updated_at": _TIME},
}  # fmt: skip
_ROW: dict[str, Any] = {
    "tuning": _ID, "created_at": _TIME, "model": "mine-7b", "cluster": "blue", "state": "searching", "message": "",
    "place": None, "trials": 7, "gpu_s_spent": 3168.0, "plan": _PLAN, "tokens_per_s_per_gpu": 3310.5, "pool": "blue",
    "principal": "ci",
}  # fmt: skip
_BEST: dict[str, Any] = {
    "plan": _PLAN, **_SPEED, "t_comm_s": 2.3, "t_comm_exposed_s": 1.8, "t_calc_s": 8.1, "mu": 0.284, "mfu": 0.44,
    "step_time_s": 9.9, "peak_memory_bytes": 51539607552.0, "memory_source": "torch.cuda", "too_close_to_call": [],
    "preferred_because": None, "why": ["tp 4 instead of 2: 6 % slower, most of it tensor parallelism (measured)"],
}  # fmt: skip
_EXPLANATION: dict[str, Any] = {
    "limits": [
        {"kind": "communication", "share": 0.18, "source": "measured", "text": "18 % of the step is communication"}
    ],
    "losses": [
        {
            "plan": _OTHER_PLAN, "best": _PLAN, "change": "tp 4 instead of 2", "slower": 0.06,
            "parts": [{"part": "tensor parallelism", "seconds": 2.1, "instead_of_s": 1.5}], "source": "measured",
            "refusal": None, "text": "tp 4 instead of 2: 6 % slower, most of it tensor parallelism (measured)",
        }
    ],
    "what_ifs": [
        {
            "change": "links between nodes twice as fast", "gain": 0.04, "plan": _PLAN, "source": "estimate",
            "text": "links between nodes twice as fast: +4% tokens/s/GPU, with tp2.pp1.dp8.mb1.zero1.sp (estimate)",
        }
    ],
}  # fmt: skip
_FRAMEWORKS: list[dict[str, Any]] = [
    {"target": "megatron@0.19", "reason": None, "plan": _PLAN, "tokens_per_s_per_gpu": 3310.5},
    {
        "target": "torchtitan@0.2", "reason": "fsdp: it shards gradients too: zero_stage 2 or 3, not 1", "plan": None,
        "tokens_per_s_per_gpu": None,
    },
]  # fmt: skip
_FINDINGS: list[dict[str, Any]] = [
    {
        "rule": "little-headroom", "severity": "warning",
        "text": "it needs 70.1 of the 72.6 GiB that can be used: P(fits) is 71%",
        "remedy": "recompute more, or a smaller micro-batch (most of it are activations), or measure it before a long "
        "run",
        "figures": {"p_fits": 0.71, "needed_bytes": 75269677056.0, "usable_bytes": 77953731379.2}, "where": "",
        "source": "estimate",
    }
]  # fmt: skip
_FOUND: dict[str, Any] = {
    "tuning": _ID, "state": "done", "model": "mine-7b", "cluster": "blue", "workload": _WORKLOAD, "best": _BEST,
    "measured_at": _LATER, "fingerprint_key": _FINGERPRINT,
    "fingerprint": {
        "hostname": "blue-07", "device_name": "NVIDIA A100-SXM4-80GB", "device_count": 8,
        "device_memory_bytes": 85899345920, "driver": "580.95.05", "runtime": "13.0",
        "collective_library": "nccl 2.28.9", "torch": "2.11.0", "python": "3.12.3",
    },
    "runner_up": {"plan": _OTHER_PLAN, "tokens_per_s_per_gpu": 3120.0, "interval": [3101.0, 3139.5], "repeats": 2},
    "frameworks": _FRAMEWORKS, "findings": _FINDINGS,
    "launch": {
        "target": "megatron", "version": "0.19",
        "argv": ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--tensor-model-parallel-size", "2"],
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "config": "", "config_name": "", "placeholders": [],
        "notes": ["NullTokenizer adds one token"], "files": {"launch.sh": "#!/usr/bin/env bash"},
    },
}  # fmt: skip
_ENTRY: dict[str, Any] = {
    "id": 31, "model": "mine-7b", "parameters": 7.24e9, "cluster": "blue", "devices": 16, "workload": _WORKLOAD,
    "plan": _PLAN, **_SPEED, "peak_bytes": 51539607552, "memory_source": "torch.cuda", "memory_margin": 0.4,
    "runner_up": {
        "plan": _OTHER_PLAN, "tokens_per_s_per_gpu": 3120.0, "interval": [3101.0, 3139.5], "repeats": 2,
        "too_close": False,
    },
    "too_close": False, "reason": "", "source": "measured", "tuning_id": _ID, "fingerprint_key": _FINGERPRINT,
    "environment_key": _ENVIRONMENT, "measured_at": _LATER, "superseded_at": None,
}  # fmt: skip
_NEAR: dict[str, Any] = {
    "id": 31, "model_name": "mine-7b", "model_key": "0f6e8c11d2b7a945", "parameters": 7.24e9,
    "cluster_key": "c3a97d0b5e812f64", "device_name": "a100-80gb-sxm", "gpus_per_node": 8, "devices": 16,
    "workload_key": "5b7e0d4a9c216f38", "seq_len": 4096, "global_batch": 128, "dtype": "bf16",
    "environment_key": _ENVIRONMENT, "source": "measured", "tokens_per_s_per_gpu": 3310.5, "measured_at": _LATER,
    "distance": 0.69, "differs": ["128 sequences a step instead of 256"],
}  # fmt: skip
_NODE: dict[str, Any] = {
    "name": "blue-07", "pool": "blue", "address": "10.0.0.7", "topology": "rack1/switch2", "device": DEVICE,
    "slots": 8, "nics": 8, "cores": 128, "memory_bytes": 1099511627776, "fingerprint_key": _FINGERPRINT,
    "environment_key": _ENVIRONMENT, "session": "f3b1c9d0", "state": "ready", "reason": "", "failures": 0,
    "world_id": "", "lost_after_s": 15.0, "registered_at": _TIME, "heartbeat_at": _LATER, "obstacle": "",
    "job": "a81f03c4d9e2", "heartbeat_age_s": 1.2,
}  # fmt: skip
_JOB: dict[str, Any] = {
    "id": "a81f03c4d9e2", "purpose": "profile", "pool": "blue", "cluster": CLUSTER,
    "request": {"kind": "collective", "op": "all_reduce", "group_size": 16, "sizes_bytes": [1048576, 268435456]},
    "tuning_id": _ID, "principal": "ci", "deadline_s": 120.0, "state": "granted", "token": 412,
    "members": [
        {"node": "blue-07", "index": 0, "address": "10.0.0.7", "state": "running", "expires_at": _LATER},
        {"node": "blue-08", "index": 1, "address": "10.0.0.8", "state": "running", "expires_at": _LATER},
    ],
    "created_at": _TIME, "granted_at": _LATER,
}  # fmt: skip
_MEASUREMENT: dict[str, Any] = {
    "id": 2041, "probe_run_id": "c7d2a9b0e415", "cluster_key": "c3a97d0b5e812f64", "fingerprint_key": _FINGERPRINT,
    "op": "all_reduce", "group_size": 16, "stride": 1, "size_bytes": 268435456, "iterations": 7, "time_s": 0.0031,
    "time_p10_s": 0.003, "time_p90_s": 0.0033, "algbw_bytes_per_s": 8.66e10, "busbw_bytes_per_s": 1.62e11,
    "hostname": "blue-07", "device_name": "NVIDIA A100-SXM4-80GB", "device_count": 8, "driver": "580.95.05",
    "runtime": "13.0", "collective_library": "nccl 2.28.9", "torch": "2.11.0", "tuning_id": _ID,
    "measured_at": _LATER, "log_path": "/var/log/autotune/c7d2a9b0e415",
}  # fmt: skip
_KEY: dict[str, Any] = {
    "id": "9b1f0c5e77aa", "name": "ci", "role": "submit", "created_at": _TIME, "expires_at": None, "revoked_at": None,
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "TuningPage": {"tunings": [_ROW], "next": f"/tunings?limit=1&after={_ID}"},
    "Submitted": _SUBMITTED,
    "TuningAnswer": {
        "tuning": _ID, "state": "searching", "stop_reason": "", "sampler": "plan", "best": _BEST,
        "explanation": _EXPLANATION, "trials": [_TRIAL], "gpu_s_spent": 3168.0, "frameworks": [], "findings": [],
        "place": None,
        "request": _TUNING,
    },
    "TrialPage": {"trials": [_TRIAL], "next": None},
    "BestAnswer": _FOUND,
    "KnownAnswer": {
        "model": "mine-7b", "cluster": "blue", "devices": 16, "workload": _WORKLOAD | {"global_batch": 256},
        "known": None, "stale": [], "others": [], "nearest": [_NEAR],
        "carried": {
            "plan": _PLAN, "tokens_per_s_per_gpu": 3390.0, "interval": [3180.0, 3610.0], "interval_probability": 0.9,
            "p_fits": 0.98, "estimate": _ESTIMATE, "trial_gpu_s": 1600.0, "source": "estimate",
        },
        "carried_why_not": None, "misses": None,
        "settle": {
            "probes": [{"probe": "layer", "part": "layer", "tp": 4, "micro_batch": 1}], "plans": [_PLAN], "trials": 3,
            "gpu_s": 4992.0, "source": "estimate",
        },
        "tuning": None, "launch": None,
    },
    "KnownPage": {"entries": [_ENTRY], "next": None},
    "PlansAnswer": {
        "model": "mine-7b", "cluster": "blue", "devices": 16, "workload": _WORKLOAD, "legal": 14208, "fitting": 9120,
        "seconds": 0.05, "estimates_per_s": 510000.0, "basis": "catalog",
        "frameworks": [{**_FRAMEWORKS[0], "tokens_per_s_per_gpu": None}], "findings": _FINDINGS,
        "plans": [{"plan": _PLAN, "estimate": _ESTIMATE | {"basis": "catalog"}, "alike": 12}],
    },
    "ModelSpec": MODEL,
    "ModelPage": {"models": [{"origin": "stored", **MODEL}], "next": None},
    "ClusterSpec": CLUSTER,
    "ClusterPage": {"clusters": [CLUSTER], "next": None},
    "NodePage": {"nodes": [_NODE], "next": None},
    "NodeAnswer": {
        "node": _NODE,
        "incidents": [
            {
                "node": "blue-07", "at": _TIME, "kind": "straggler", "job_id": "a81f03c4d9e2",
                "message": "rank 3 computes 1.4 times as long as others of its stage",
            }
        ],
    },
    "NodeChanged": {"node": "blue-07", "state": "quarantined", "reason": "its fan is broken (by ops)"},
    "NodeForgotten": {"node": "blue-07"},
    "MeasurementPage": {"measurements": [_MEASUREMENT], "next": "/measurements?kind=collective&limit=1&after=2041"},
    "JobPage": {"jobs": [_JOB], "next": None},
    "KeyPage": {"keys": [_KEY], "next": None},
    "KeyCreated": {"key": _KEY, "secret": "autotune_" + "x" * 43},
    "ApiKey": _KEY | {"revoked_at": _LATER},
    "Alive": {"status": "ok"},
    "Health": {"status": "ok", "database": "ok", "broker": "ok"},
}  # fmt: skip
EVENT = {
    "id": "7",
    "event": "state",
    "data": f'{{"at":"{_TIME}","data":{{"message":"","state":"queued"}},"id":7,"kind":"state","tuning_id":"{_ID}"}}',
}

# Links of the OpenAPI document: what else can be asked with a value of an answer, and of which operation.

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
