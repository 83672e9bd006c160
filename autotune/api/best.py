"""The best plan: of a tuning, or what is known for a model, a cluster and a workload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autotune.api.answers import BestAnswer, Json
from autotune.api.known_answers import KnownAnswer, KnownPage
from autotune.api.openapi import answer, either, problems
from autotune.api.parts import Parts, parts_of
from autotune.api.requests import (
    DEFAULT_LIMIT,
    AfterNumber,
    DTypeName,
    GlobalBatch,
    Limit,
    Nodes,
    SeqLen,
    WorkloadRequest,
    find_cluster,
    find_model,
    find_workload,
    page,
)
from autotune.api.roles import GuardedRoute
from autotune.api.sharing import REFUSALS, one_at_a_time, require_bounded, told
from autotune.api.tunings import version_of
from autotune.errors import InputError
from autotune.export import launch_arguments, targets
from autotune.knowledge.answer import Answer, best_known, entry_data
from autotune.ports.fleet import FleetStore
from autotune.search.ranking import best_of
from autotune.search.space import Runtime
from autotune.specs import ClusterSpec, ModelSpec, Plan, Tuning, Workload
from autotune.tuning.report import best_answer

router = APIRouter(route_class=GuardedRoute, tags=["plans"])

NEWEST = 50
"""Among so many tunings the newest that measured something is looked for, where none is named."""

_Text = Annotated[str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


@router.get("/best", responses=either(200, BestAnswer, KnownAnswer) | problems(404))
async def best(
    request: Request,
    tuning: Annotated[_Text, Query(description="A tuning's id, instead of what was tuned.")] = None,
    model: Annotated[_Text, Query(description="A preset or stored model; needs `cluster`.")] = None,
    cluster: Annotated[_Text, Query(description="A stored cluster; needs `model`.")] = None,
    nodes: Nodes = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    dtype: DTypeName = None,
    target: Annotated[
        str | None,
        Query(alias="for", json_schema_extra={"enum": [*targets()]}, description="Give the launch arguments too."),
    ] = None,
) -> Response:
    """The best plan: its evidence, the runner-up and how to launch it.

    For a model, a cluster and a workload: what is known of exactly that, else the nearest that is, what it implies, and
    what would settle it. Of the tuning that is named; without anything of the newest tuning that measured something.
    What is known may be as it was two seconds ago.
    """
    parts = parts_of(request)
    given = WorkloadRequest(seq_len=seq_len, global_batch=global_batch, dtype=dtype)
    if tuning is not None:
        return await run_in_threadpool(lambda: Json(_of_named(parts, parts.store.tuning(tuning), target)))
    asked = ("best", model, cluster, nodes, given, target)

    def find() -> bytes:
        return Json.of(_best(parts, model, cluster, nodes, given, target))

    body: bytes = await parts.shared.get(asked, lambda: run_in_threadpool(find))
    return Response(body, media_type=Json.media_type)


@router.get("/known", responses=answer(200, KnownPage))
def list_known(
    request: Request,
    model: Annotated[_Text, Query(description="Only of this model.")] = None,
    cluster: Annotated[_Text, Query(description="Only on this cluster.")] = None,
    device: Annotated[_Text, Query(description="Only on this device.")] = None,
    source: Annotated[_Text, Query(description="`measured`, or the name of an import.")] = None,
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
    parts: Parts, model: str | None, cluster: str | None, nodes: int | None, given: WorkloadRequest, target: str | None
) -> dict[str, Any]:
    """What is known of what is asked for; of the newest tuning that measured something where nothing is."""
    if model is None and cluster is None:
        return _of_named(parts, _newest(parts.store), target)
    return _known(parts, _question(parts, model, cluster, nodes, given), target)


def _of_named(parts: Parts, tuning: Tuning, target: str | None) -> dict[str, Any]:
    data = _of_tuning(parts, tuning)
    question = tuning.model, tuning.cluster, tuning.workload
    return data | {"launch": _launch(question, data["best"]["plan"], target)}


def _known(parts: Parts, question: Question, target: str | None) -> dict[str, Any]:
    found, tuning = _look_up(parts, question), _fastest(parts.store, *question)
    data = found.to_data() | {"tuning": None if tuning is None else _of_tuning(parts, tuning) | {"launch": None}}
    plan = found.known.plan if found.known else found.carried.plan if found.carried else None
    if found.known is None and tuning is not None:
        plan = Plan.from_data(data["tuning"]["best"]["plan"])
    return data | {"launch": _launch(question, plan.to_data(), target) if plan is not None else None}


def _look_up(parts: Parts, question: Question) -> Answer:
    """The answer. An estimate weighs all plans: bounded like a ranking, and once for all who ask at the same time."""
    require_bounded(parts.answers, *question, Runtime.TORCH)
    if parts.store.best_exact(*question):
        return best_known(parts.store, *question)

    def weigh() -> Answer | Exception:
        with one_at_a_time():
            try:
                return best_known(parts.store, *question)
            except REFUSALS as error:
                return error

    model, cluster, workload = question
    found: Answer = told(parts.estimates.get((model.key, cluster.key, workload), weigh))
    return found


def _of_tuning(parts: Parts, tuning: Tuning) -> dict[str, Any]:
    found: dict[str, Any] = parts.answers.get(("best", *version_of(tuning)), lambda: _answer(parts.store, tuning))
    return found


def _fastest(store: FleetStore, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Tuning | None:
    trials = store.best_trials(model, cluster, workload, limit=1)
    return store.tuning(trials[0].tuning_id) if trials else None


def _newest(store: FleetStore) -> Tuning:
    for tuning in store.tunings(NEWEST):
        if best_of(store.trials(tuning.id), tuning.cluster) is not None:
            return tuning
    raise InputError("tuning", None, "no tuning has a complete trial yet: POST /tunings")


def _answer(store: FleetStore, tuning: Tuning) -> dict[str, Any]:
    found = best_of(store.trials(tuning.id), tuning.cluster)
    if found is None:
        raise InputError("tuning", tuning.id, "it has no complete trial yet: GET /tunings/{id}")
    return best_answer(store, tuning, found)


def _launch(question: Question, plan: dict[str, Any], target: str | None) -> dict[str, Any] | None:
    return None if target is None else asdict(launch_arguments(target, *question, Plan.from_data(plan)))
