"""Plans: the instant ranking by estimate, without any hardware. Bounded in work: one at a time, of a bounded table."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from autotune.api.answers import Json, PlansAnswer
from autotune.api.openapi import answer, problems
from autotune.api.parts import parts_of
from autotune.api.requests import (
    ClusterName,
    DTypeName,
    GlobalBatch,
    ModelName,
    Nodes,
    SeqLen,
    WorkloadRequest,
    find_cluster,
    find_model,
    find_workload,
)
from autotune.api.roles import GuardedRoute
from autotune.api.sharing import one_at_a_time, require_bounded
from autotune.search.offline import rank
from autotune.specs import Recompute, Schedule, Space
from autotune.tuning.report import ranking_data

router = APIRouter(route_class=GuardedRoute, tags=["plans"])

Degree = Annotated[int, Query(ge=1, le=2**31 - 1)]
Tp = Annotated[list[Degree] | None, Query(max_length=64, description="Tensor parallel degrees.")]
Pp = Annotated[list[Degree] | None, Query(max_length=64, description="Pipeline parallel degrees.")]
MicroBatch = Annotated[list[Degree] | None, Query(max_length=64, description="Sequences a micro-batch.")]
Stage = Annotated[int, Query(ge=0, le=3)]
ZeroStage = Annotated[list[Stage] | None, Query(max_length=4, description="ZeRO stages.")]
Recomputes = Annotated[list[Recompute] | None, Query(max_length=3, description="Kinds of recomputation.")]
SequenceParallel = Annotated[list[bool] | None, Query(max_length=2, description="With or without.")]
Schedules = Annotated[list[Schedule] | None, Query(max_length=3, description="Pipeline schedules.")]


@router.get("/plans", responses=answer(200, PlansAnswer) | problems(422))
def rank_plans(
    request: Request,
    model: ModelName,
    cluster: ClusterName,
    nodes: Nodes = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    dtype: DTypeName = None,
    tp: Tp = None,
    pp: Pp = None,
    micro_batch: MicroBatch = None,
    zero_stage: ZeroStage = None,
    recompute: Recomputes = None,
    sequence_parallel: SequenceParallel = None,
    schedule: Schedules = None,
    top: Annotated[int, Query(ge=1, le=1000, description="Plans to list.")] = 10,
) -> Json:
    """Rank all legal plans by estimate.

    Speeds come from the cluster's profile where there is one, else from the catalog. A parameter of the space may be
    given several times; one that is not given allows every legal value.
    """
    parts = parts_of(request)
    model_spec, cluster_spec = find_model(parts.store, model), find_cluster(parts.store, cluster, nodes)
    given = WorkloadRequest(seq_len=seq_len, global_batch=global_batch, dtype=dtype)
    workload = find_workload(model_spec, cluster_spec, given)
    choices = {
        "tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage, "recompute": recompute,
        "sequence_parallel": sequence_parallel, "schedule": schedule,
    }  # fmt: skip
    space = Space.from_data({name: values for name, values in choices.items() if values}, "space")
    profile = parts.store.profile(cluster_spec.key)
    key = ("plans", model_spec, cluster_spec.digest(), workload, space, profile and profile.digest(), top)

    require_bounded(parts.answers, model_spec, cluster_spec, workload)

    def compute() -> dict[str, Any]:
        with one_at_a_time():
            ranking = rank(model_spec, cluster_spec, workload, space, profile=profile, limit=top)
        return ranking_data(model_spec, cluster_spec, workload, ranking)

    return Json(parts.answers.get(key, compute))
