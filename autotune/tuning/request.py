"""Requests for tunings: the record of what is asked for, and the refusal of what cannot lead to a plan."""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain

from autotune.errors import StoreConflictError
from autotune.ports.store import KnowledgeStore
from autotune.search.offline import nearest_misses, nothing_legal
from autotune.search.space import legal_pieces, require_bounded, runtime_of
from autotune.specs import Budget, ClusterSpec, ModelSpec, SamplerName, Space, Tuning, Workload


def tuning_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    space: Space = Space(),
    budget: Budget = Budget(),
    seed: int = 0,
    cold: bool = False,
    sampler: SamplerName = SamplerName.PLAN,
    history: str = "",
    pool: str = "",
    principal: str = "",
) -> Tuning:
    """A new tuning, QUEUED: of a fleet's pool, or of one process on its own machine. Nothing is checked or stored."""
    now = datetime.now(UTC)  # for people and for the order of lists; nothing is decided by it
    return Tuning(
        id=uuid.uuid4().hex[:12],
        model=model,
        cluster=cluster,
        workload=workload,
        space=space,
        budget=budget,
        seed=seed,
        cold=cold,
        sampler=sampler,
        history=history,
        pool=pool,
        principal=principal,
        created_at=now,
        updated_at=now,
    )


def check_request(model: ModelSpec, cluster: ClusterSpec, workload: Workload, space: Space) -> None:
    """Refuses a request that cannot lead to a plan, before anything is stored or measured.

    Raises:
        InputError: no plan is legal for the request; names the reason of the simplest plan.
        NothingFitsError: no legal plan is estimated to fit (where the catalog allows an estimate).
    """
    runtime = runtime_of(workload)
    tables = legal_pieces(model, cluster, workload, space=space, runtime=runtime)
    first = next(tables, None)
    if first is None:
        raise nothing_legal(model, cluster, workload, runtime, space)
    nearest_misses(model, cluster, workload, chain([first], tables), space=space, runtime=runtime)


def submit(store: KnowledgeStore, tuning: Tuning) -> Tuning:
    """Stores a request that a process will measure for on its own machine (fleet.local).

    Raises:
        UnknownNameError: nothing was imported under the source that it is to learn from.
        InputError, NothingFitsError: see `check_request`; or it has too many plans.
    """
    require_bounded(tuning.model, tuning.cluster, tuning.workload, runtime_of(tuning.workload))
    check_request(tuning.model, tuning.cluster, tuning.workload, tuning.space)
    if tuning.history:
        store.imported_readings(tuning.history, tuning.cluster.key)  # refuses a source that nobody knows
    with suppress(StoreConflictError):  # somebody else's has the name; the tuning has its own copy
        store.put_model(tuning.model, only_own=True)
    with suppress(StoreConflictError):
        store.put_cluster(tuning.cluster, only_own=True)
    store.create_tuning(tuning)
    return tuning
