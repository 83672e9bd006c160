"""The best measured plan: of a tuning, or for a model, a cluster and a workload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from autotune.api.answers import BestAnswer, Json
from autotune.api.openapi import answer, problems
from autotune.api.parts import Parts, parts_of
from autotune.api.requests import (
    DTypeName,
    GlobalBatch,
    Nodes,
    SeqLen,
    WorkloadRequest,
    find_cluster,
    find_model,
    find_workload,
)
from autotune.api.roles import GuardedRoute
from autotune.api.tunings import version_of
from autotune.errors import InputError
from autotune.export import launch_arguments, targets
from autotune.specs import ClusterSpec, ModelSpec, Plan, Tuning, Workload
from autotune.tuning.best import best_of
from autotune.tuning.fleet_ports import FleetStore
from autotune.tuning.report import best_answer

router = APIRouter(route_class=GuardedRoute, tags=["plans"])

NEWEST = 50
"""Among so many tunings the newest that measured something is looked for, where none is named."""

_Text = Annotated[str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


@router.get("/best", responses=answer(200, BestAnswer) | problems(404))
def best(
    request: Request,
    tuning: Annotated[_Text, Query(description="A tuning's id, instead of what was tuned.")] = None,
    model: Annotated[_Text, Query(description="A preset or stored model; needs `cluster`.")] = None,
    cluster: Annotated[_Text, Query(description="A stored cluster; needs `model`.")] = None,
    nodes: Nodes = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    dtype: DTypeName = None,
    target: Annotated[
        str | None, Query(alias="for", description="Give the launch arguments too: " + ", ".join(targets()))
    ] = None,
) -> Json:
    """The best measured plan, its evidence, the runner-up and how to launch it.

    Of the tuning that is named; else of the tuning with the fastest trial of this model, cluster and workload; without
    any of them of the newest tuning that measured something.
    """
    parts = parts_of(request)
    if tuning is not None:
        asked = parts.store.tuning(tuning)
    elif model is not None or cluster is not None:
        given = WorkloadRequest(seq_len=seq_len, global_batch=global_batch, dtype=dtype)
        asked = _measured(parts, model, cluster, nodes, given)
    else:
        asked = parts.recent.get("newest", lambda: _newest(parts.store))
    data = parts.answers.get(("best", *version_of(asked)), lambda: _answer(parts.store, asked))
    return Json(data | {"launch": _launch(asked, data, target)})


def _measured(
    parts: Parts, model: str | None, cluster: str | None, nodes: int | None, given: WorkloadRequest
) -> Tuning:
    """The tuning with the fastest trial of what is asked for, as it was a second ago at most. Raises InputError."""
    if model is None or cluster is None:
        missing = "cluster" if cluster is None else "model"
        raise InputError(missing, None, "model and cluster are given together")
    model_spec, cluster_spec = find_model(parts.store, model), find_cluster(parts, cluster, nodes)
    workload = find_workload(model_spec, cluster_spec, given)
    question = model_spec, cluster_spec, workload
    key = ("question", model_spec.key, cluster_spec.key, workload)
    found: Tuning | None = parts.recent.get(key, lambda: _fastest(parts.store, *question))
    if found is None:
        what = f"{model} on {cluster}, sequence {workload.seq_len}, {workload.global_batch} sequences a step"
        raise InputError("best", what, "nothing was measured for it yet: POST /tunings")
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


def _launch(tuning: Tuning, data: dict[str, Any], target: str | None) -> dict[str, Any] | None:
    if target is None:
        return None
    plan = Plan.from_data(data["best"]["plan"])
    return asdict(launch_arguments(target, tuning.model, tuning.cluster, tuning.workload, plan))
