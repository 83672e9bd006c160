"""From the fleet's specs to rows and back."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from autotune.specs import (
    ApiKey,
    ClusterSpec,
    Device,
    FailureKind,
    Job,
    JobMember,
    JobPurpose,
    JobState,
    MemberReport,
    MemberState,
    Node,
    NodeState,
    ProbeProgress,
    ProbeRequest,
    Role,
)
from storage.fleet.tables import ApiKeyRow, JobRow, MemberRow, NodeRow
from storage.tunings.rows import values

REQUEST: TypeAdapter[ProbeRequest] = TypeAdapter(ProbeRequest)
INVENTORY = (
    "pool", "address", "topology", "slots", "nics", "cores", "memory_bytes", "fingerprint_key", "environment_key",
    "session",
)  # fmt: skip
STANDING = ("name", "reason", "failures", "world_id", "registered_at", "heartbeat_at")
JOB_PLAIN = (
    "id", "pool", "tuning_id", "trial_id", "principal", "environment_key", "only_node", "attempt", "deadline_s",
    "message", "created_at",
)  # fmt: skip
JOB_COURSE = ("cancelled", "token", "world_id", "warm", "endpoint", "granted_at", "ended_at")


def inventory_columns(node: Node) -> dict[str, Any]:
    """The columns that each registration replaces."""
    return values(node, INVENTORY) | {"device_json": node.device.to_json()}


def node_of(row: NodeRow) -> Node:
    """The node of a row."""
    return Node(
        **values(row, (*INVENTORY, *STANDING)), device=Device.from_json(row.device_json), state=NodeState(row.state)
    )


def job_row(job: Job) -> JobRow:
    """The row of a new job: queued, whatever else the record says."""
    return JobRow(
        **values(job, JOB_PLAIN),
        purpose=job.purpose.value,
        cluster_json=job.cluster.to_json(),
        devices=job.cluster.devices,
        request_json=job.request.to_json(),
        avoid_json=json.dumps(job.avoid),
        state=JobState.QUEUED.value,
        cancelled=False,
        token=0,
        world_id="",
        warm=False,
        endpoint="",
    )


def job_of(row: JobRow) -> Job:
    """The job of a row, with its members in order."""
    return Job(
        **values(row, (*JOB_PLAIN, *JOB_COURSE)),
        purpose=JobPurpose(row.purpose),
        cluster=_cluster_of(row.cluster_json),
        request=_request_of(row.request_json),
        avoid=tuple(json.loads(row.avoid_json)),
        state=JobState(row.state),
        progress=ProbeProgress.from_json(row.progress_json) if row.progress_json else None,
        failure=FailureKind(row.failure_kind) if row.failure_kind else None,
        members=tuple(_member_of(member) for member in row.members),
    )


@lru_cache(maxsize=64)
def _cluster_of(text: str) -> ClusterSpec:
    """Most jobs are of few clusters and requests, and parsing them is most of the time that a long queue takes."""
    return ClusterSpec.from_json(text)


@lru_cache(maxsize=1024)
def _request_of(text: str) -> ProbeRequest:
    return REQUEST.validate_json(text)


def _member_of(row: MemberRow) -> JobMember:
    return JobMember(
        **values(row, ("node", "address", "expires_at")),
        index=row.number,
        state=MemberState(row.state),
        report=MemberReport.from_json(row.report_json) if row.report_json else None,
    )


def key_row(key: ApiKey, secret_hash: str) -> ApiKeyRow:
    """The row of a new key."""
    plain = ("id", "name", "created_at", "expires_at", "revoked_at")
    return ApiKeyRow(**values(key, plain), role=key.role.value, secret_hash=secret_hash)


def key_of(row: ApiKeyRow) -> ApiKey:
    """The key of a row."""
    return ApiKey(**values(row, ("id", "name", "created_at", "expires_at", "revoked_at")), role=Role(row.role))
