"""Plans: the best one of a tuning, or what is known for a model, a cluster and a workload; and the instant ranking.

The ranking is by estimate, without any hardware, and bounded in work: one at a time, of a bounded table.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autotune.api.access import GuardedRoute
from autotune.api.answers import BestAnswer, Json, PlansAnswer
from autotune.api.known_answers import KnownAnswer, KnownPage
from autotune.api.openapi import answer, either, problems
from autotune.api.parts import Parts, parts_of, principal_of
from autotune.api.requests import (
    DEFAULT_LIMIT,
    AfterNumber,
    ClusterName,
    DTypeName,
    Framework,
    GlobalBatch,
    Kernels,
    Limit,
    ModelName,
    Nodes,
    Precision,
    SeqLen,
    Target,
    Text,
    WorkloadRequest,
    asked_workload,
    find_cluster,
    find_model,
    find_workload,
    page,
)
from autotune.api.sharing import one_at_a_time, require_bounded
from autotune.api.tunings import version_of
from autotune.errors import InputError
from autotune.knowledge.answer import Answer, best_known, entry_data
from autotune.search.offline import rank
from autotune.search.space import Runtime
from autotune.specs import ClusterSpec, ModelSpec, Recompute, Schedule, Space, Workload
from autotune.tuning.report import best_answer, known_answer, newest_measured, ranking_data
from autotune.tuning.targets import export_refusal

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


@router.get("/best", responses=either(200, BestAnswer, KnownAnswer) | problems(404))
async def best(
    request: Request,
    tuning: Annotated[Text, Query(description="A tuning's id, instead of what was tuned.")] = None,
    model: Annotated[Text, Query(description="A preset or stored model; needs `cluster`.")] = None,
    cluster: Annotated[Text, Query(description="A stored cluster; needs `model`.")] = None,
    nodes: Nodes = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    dtype: DTypeName = None,
    framework: Framework = None,
    kernels: Kernels = None,
    precision: Precision = None,
    target: Target = None,
) -> Response:
    """The best plan: its evidence, the runner-up and how to launch it.

    For a model, a cluster and a workload: what is known of exactly that, else the nearest that is, what it implies, and
    what would settle it. For a named tuning: its best plan; with no arguments that of the newest tuning that measured
    something. Answers may be two seconds old.
    """
    parts, principal = parts_of(request), principal_of(request).name
    given = asked_workload(seq_len, global_batch, dtype, framework, kernels, precision, target)
    if tuning is not None:
        return await run_in_threadpool(lambda: Json(best_answer(parts.store, parts.store.tuning(tuning), target)))
    asked = ("best", principal, model, cluster, nodes, given, target)

    def find() -> bytes:
        return Json.of(_best(parts, principal, model, cluster, nodes, given, target))

    body: bytes = await parts.shared.get(asked, lambda: run_in_threadpool(find))
    return Response(body, media_type=Json.media_type)


@router.get("/known", responses=answer(200, KnownPage))
def list_known(
    request: Request,
    model: Annotated[Text, Query(description="Only of this model.")] = None,
    cluster: Annotated[Text, Query(description="Only on this cluster.")] = None,
    device: Annotated[Text, Query(description="Only on this device.")] = None,
    source: Annotated[Text, Query(description="`measured`, or the name of an import.")] = None,
    history: Annotated[bool, Query(description="Entries that were superseded, too.")] = False,
    limit: Limit = DEFAULT_LIMIT,
    after: AfterNumber = None,
) -> Json:
    """List best-known plans, newest first."""
    store = parts_of(request).store
    found = store.best_page(
        model=model, cluster=cluster, device=device, source=source, history=history, before=after, limit=limit + 1
    )
    return page(request, "entries", found, limit, cursor=lambda entry: entry.id, data=entry_data)


@router.get("/plans", responses=answer(200, PlansAnswer) | problems(422))
async def rank_plans(
    request: Request,
    model: ModelName,
    cluster: ClusterName,
    nodes: Nodes = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    dtype: DTypeName = None,
    framework: Framework = None,
    kernels: Kernels = None,
    precision: Precision = None,
    target: Target = None,
    tp: Tp = None,
    pp: Pp = None,
    micro_batch: MicroBatch = None,
    zero_stage: ZeroStage = None,
    recompute: Recomputes = None,
    sequence_parallel: SequenceParallel = None,
    schedule: Schedules = None,
    top: Annotated[int, Query(ge=1, le=1000, description="Plans to list.")] = 10,
    every: Annotated[
        bool, Query(alias="all", description="List plans that the estimate cannot tell apart, too.")
    ] = False,
) -> Response:
    """Rank all legal plans by estimate, each tp, pp, ep and etp once.

    Of plans that the estimate cannot tell apart (within 5 %) the simplest is listed, with how many others there are.

    Speeds come from the cluster's profile where there is one, else from the catalog. A parameter of the space may be
    given several times; one that is not given allows every legal value. Answers may be two seconds old.
    """
    parts, principal = parts_of(request), principal_of(request).name
    given = asked_workload(seq_len, global_batch, dtype, framework, kernels, precision, target)
    choices = {
        "tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage, "recompute": recompute,
        "sequence_parallel": sequence_parallel, "schedule": schedule,
    }  # fmt: skip
    space = Space.from_data({name: values for name, values in choices.items() if values}, "space")

    def find() -> bytes:
        return _ranked(parts, principal, model, cluster, nodes, given, space, top, every=every)

    # However often a principal asks the same while it is worked out, it waits in no thread. A refusal is his alone.
    asked = ("plans", principal, model, cluster, nodes, given, space, top, every)
    body: bytes = await parts.shared.get(asked, lambda: run_in_threadpool(find))
    return Response(body, media_type=Json.media_type)


def _ranked(
    parts: Parts,
    principal: str,
    model: str,
    cluster: str,
    nodes: int | None,
    given: WorkloadRequest,
    space: Space,
    top: int,
    *,
    every: bool,
) -> bytes:
    model_spec, cluster_spec = find_model(parts.store, model), find_cluster(parts.store, cluster, nodes)
    workload = find_workload(model_spec, cluster_spec, given)
    profile = parts.store.profile(cluster_spec.key)
    digests = (model_spec.digest(), cluster_spec.digest(), workload.key, space.digest(), profile and profile.digest())
    require_bounded(parts.answers, model_spec, cluster_spec, workload)

    def compute() -> bytes:
        with one_at_a_time(principal):
            ranking = rank(
                model_spec, cluster_spec, workload, space, profile=profile, limit=top, distinct=not every,
                refusal=export_refusal(model_spec, cluster_spec, workload),
            )  # fmt: skip
        return Json.of(ranking_data(model_spec, cluster_spec, workload, ranking, profile))

    body: bytes = parts.answers.get(("plans", *digests, top, every), compute)
    return body


Question = tuple[ModelSpec, ClusterSpec, Workload]


def _question(
    parts: Parts, model: str | None, cluster: str | None, nodes: int | None, given: WorkloadRequest
) -> Question:
    """What is asked for. Raises InputError."""
    if model is None or cluster is None:
        missing = "cluster" if cluster is None else "model"
        raise InputError(missing, None, "model and cluster are given together")
    model_spec, cluster_spec = find_model(parts.store, model), find_cluster(parts.store, cluster, nodes)
    return model_spec, cluster_spec, find_workload(model_spec, cluster_spec, given)


def _best(
    parts: Parts,
    principal: str,
    model: str | None,
    cluster: str | None,
    nodes: int | None,
    given: WorkloadRequest,
    target: str | None,
) -> dict[str, Any]:
    """The answer to the question; without one, the best plan of the newest tuning that measured something."""
    if model is None and cluster is None:
        newest = newest_measured(parts.store)
        if newest is None:
            raise InputError("tuning", None, "no tuning has a complete trial yet: POST /tunings")
        found: dict[str, Any] = parts.answers.get(
            ("best", *version_of(newest), target), lambda: best_answer(parts.store, newest, target)
        )
        return found
    model_spec, cluster_spec, workload = _question(parts, model, cluster, nodes, given)

    def look_up(asked: Workload) -> Answer:
        return _look_up(parts, principal, (model_spec, cluster_spec, asked))

    return known_answer(parts.store, model_spec, cluster_spec, workload, target, look_up)


def _look_up(parts: Parts, principal: str, question: Question) -> Answer:
    """The answer. An estimate weighs all plans: bounded like a ranking, and once for all who ask at the same time."""
    require_bounded(parts.answers, *question, Runtime.TORCH)
    if parts.store.best_exact(*question):
        return best_known(parts.store, *question)

    def weigh() -> Answer:
        with one_at_a_time(principal):
            return best_known(parts.store, *question)

    model, cluster, workload = question
    found: Answer = parts.estimates.get((model.key, cluster.key, workload.key), weigh)
    return found
