"""A request to a fleet, as it is stored: the tuning that it asks for, and what it may share one by."""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import UTC, datetime

from autotune.specs import Budget, ClusterSpec, ModelSpec, SamplerName, Space, Tuning, Workload
from autotune.tuning.fleet_ports import Submission


def submission_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    space: Space = Space(),
    budget: Budget = Budget(),
    seed: int = 0,
    cold: bool = False,
    sampler: SamplerName = SamplerName.PLAN,
    principal: str,
    idempotency_key: str | None = None,
) -> Submission:
    """A request by `principal` for a tuning in the pool of the cluster's name. Nothing is checked, nothing stored."""
    now = datetime.now(UTC)  # for people and for the order of lists; nothing is decided by it
    tuning = Tuning(
        id=uuid.uuid4().hex[:12],
        model=model,
        cluster=cluster,
        workload=workload,
        space=space,
        budget=budget,
        seed=seed,
        cold=cold,
        sampler=sampler,
        pool=cluster.name,
        principal=principal,
        created_at=now,
        updated_at=now,
    )
    asked = request_key(tuning)
    return Submission(tuning=tuning, sharing_key=asked, request_digest=asked, idempotency_key=idempotency_key)


def request_key(tuning: Tuning) -> str:
    """Equal for requests that ask for the same thing, whoever asks and when."""
    parts = {name: getattr(tuning, name).to_data() for name in ("model", "cluster", "workload", "space", "budget")} | {
        "seed": tuning.seed,
        "cold": tuning.cold,
        "sampler": tuning.sampler.value,
    }
    if tuning.history:
        parts["history"] = tuning.history
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
