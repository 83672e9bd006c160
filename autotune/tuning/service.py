"""The service: submit, advance, cancel and answer. The doors (CLI, API) call nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime

from autotune.errors import InputError
from autotune.ports.store import KnowledgeStore, Prober
from autotune.search.offline import nearest_misses, nothing_legal
from autotune.search.ranking import Best, best_of
from autotune.search.space import Runtime, legal_plans, require_bounded
from autotune.specs import (
    Budget,
    ClusterSpec,
    ModelSpec,
    Profile,
    SamplerName,
    Space,
    Trial,
    Tuning,
    TuningState,
    Workload,
)
from autotune.tuning.campaign import Campaign
from autotune.tuning.events import OnEvent
from autotune.tuning.ownership import owner_lives

OpenProber = Callable[[ClusterSpec], Prober]


class TuningService:
    """Requests and their lifecycle over one store.

    Args:
        store: keeps everything.
        open_prober: gives the prober for a cluster; called when a tuning is advanced, never before.
    """

    def __init__(self, store: KnowledgeStore, open_prober: OpenProber) -> None:
        self._store, self._open_prober = store, open_prober

    def submit(
        self,
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
    ) -> Tuning:
        """Stores a request, QUEUED. `history` is a source of imports that the search learns from.

        Raises:
            UnknownNameError: there is no such source.
            InputError: no plan is legal for the request; names the reason of the simplest plan. Or it has too many.
            NothingFitsError: no legal plan is estimated to fit (where the catalog allows an estimate).
        """
        require_bounded(model, cluster, workload, Runtime.TORCH)
        check_request(model, cluster, workload, space)
        if history:
            self._store.imported_readings(history, cluster.key)  # refuses a source that nobody knows
        now = datetime.now(UTC)
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
            history=history,
            created_at=now,
            updated_at=now,
        )
        self._store.put_model(model)
        self._store.put_cluster(cluster)
        self._store.create_tuning(tuning)
        return tuning

    def run(self, tuning_id: str, on_event: OnEvent) -> Tuning:
        """Advances a tuning to its end; may be interrupted and called again, also after a kill -9.

        Raises:
            UnknownNameError: no such tuning.
            InputError: a fleet measures for it.
            StoreConflictError: another living process runs it.
            ProberError: there is nothing to measure with.
        """
        tuning = self._store.tuning(tuning_id)
        if tuning.state.ended:
            return tuning
        _require_own(tuning)
        with closing(self._open_prober(tuning.cluster)) as prober:
            campaign = Campaign(self._store, prober, tuning, on_event)
            try:
                while campaign.advance():
                    pass
            finally:
                campaign.close()
                if not campaign.tuning.state.ended:
                    campaign.release()
        return campaign.tuning

    def cancel(self, tuning_id: str) -> Tuning:
        """Ends a tuning that nobody runs. Raises InputError if it has ended or is being run by a living process."""
        tuning = self._store.tuning(tuning_id)
        if tuning.state.ended:
            raise InputError("tuning", tuning.id, f"it has ended already ({tuning.state})")
        _require_own(tuning)
        if tuning.owner and owner_lives(tuning.owner):
            raise InputError("tuning", tuning.id, f"interrupt the process that runs it ({tuning.owner})")
        changed = tuning.model_copy(
            update={"state": TuningState.CANCELLED, "owner": "", "updated_at": datetime.now(UTC)}
        )
        self._store.save_tuning(changed, expected_owner=tuning.owner)
        return self._store.tuning(tuning.id)

    def trials(self, tuning_id: str) -> Sequence[Trial]:
        """The trials of a tuning by number."""
        return self._store.trials(self._store.tuning(tuning_id).id)

    def profile(self, tuning: Tuning) -> Profile | None:
        """The newest profile of the tuning's cluster."""
        return self._store.profile(tuning.cluster.key)

    def best(self, tuning_id: str) -> Best | None:
        """The winner of a tuning so far; None when nothing was measured."""
        tuning = self._store.tuning(tuning_id)
        return best_of(self._store.trials(tuning.id), tuning.cluster)


def _require_own(tuning: Tuning) -> None:
    if tuning.pool:
        raise InputError("tuning", tuning.id, f"the fleet's pool {tuning.pool} measures for it: ask its server")


def check_request(model: ModelSpec, cluster: ClusterSpec, workload: Workload, space: Space) -> None:
    """Refuses a request that cannot lead to a plan, before anything is stored or measured."""
    table = legal_plans(model, cluster, workload, space=space, runtime=Runtime.TORCH)
    if not len(table):
        raise nothing_legal(model, cluster, workload, Runtime.TORCH, space)
    nearest_misses(model, cluster, workload, table, space=space, runtime=Runtime.TORCH)
