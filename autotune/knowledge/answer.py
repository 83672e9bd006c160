"""The answer to "what is the best known plan?": measured for exactly that, or the nearest and what it implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cost.parameters import total_parameters
from autotune.errors import AutotuneError, MissingMeasurementError, NothingFitsError
from autotune.knowledge.nearness import Change, Near, changes, nearest
from autotune.knowledge.settling import Settlement, settlement
from autotune.knowledge.transfer import Carried, carry, moved_profile, taught
from autotune.ports.store import KnowledgeStore
from autotune.search.offline import nearest_misses
from autotune.search.posterior import TransferObservation
from autotune.search.space import legal_pieces, runtime_of
from autotune.search.transfer import merged
from autotune.specs import BestEntry, ClusterSpec, ModelSpec, Tuning, Workload
from autotune.specs.knowledge import MEASURED

MAX_TEACHERS = 5
"""Near tunings whose trials teach a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known.

    Args:
        known: the entry for exactly this question; None where there is none.
        stale: what of the environment changed since it was measured; empty where it is as it was.
        others: further entries for exactly this question, of other environments or sources.
        near: the nearest other entries, nearest first; only looked for where nothing is known exactly.
        carried: the estimate for the question from the nearest; None where none is possible.
        carried_why_not: why there is no estimate.
        misses: where that is because no plan fits: those that nearly do (NothingFitsError), if their memory is known.
        settle: what would settle it.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    known: BestEntry | None
    stale: Sequence[Change] = ()
    others: Sequence[BestEntry] = ()
    near: Sequence[Near] = ()
    carried: Carried | None = None
    carried_why_not: str = ""
    misses: Sequence[dict[str, object]] | None = None
    settle: Settlement | None = None

    def to_data(self) -> dict[str, Any]:
        """For --json and the API."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "devices": self.cluster.devices,
            "workload": self.workload.to_data(),
            "known": entry_data(self.known) if self.known else None,
            "stale": [{"name": item.name, "then": item.then, "now": item.now} for item in self.stale],
            "others": [entry_data(item) for item in self.others],
            "nearest": [
                {**item.entry.to_data(), "distance": item.distance, "differs": list(item.differs)} for item in self.near
            ],
            "carried": self.carried.to_data() if self.carried else None,
            "carried_why_not": self.carried_why_not or None,
            "misses": None if self.misses is None else list(self.misses),
            "settle": self.settle.to_data() if self.settle else None,
        }


def entry_data(entry: BestEntry) -> dict[str, Any]:
    """An entry for --json: model and cluster by name, the plan with its evidence and provenance."""
    data = entry.to_data()
    for name in ("model", "cluster"):
        data[name] = data[name]["name"]
    return {
        **data,
        "devices": entry.cluster.devices,
        "memory_margin": entry.memory_margin,
        "too_close": entry.too_close,
    }


def best_known(store: KnowledgeStore, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Answer:
    """Looks up what is known. Measures nothing."""
    exact = store.best_exact(model, cluster, workload)
    if not exact:
        return _from_near(store, model, cluster, workload)
    now = store.newest_fingerprint(cluster.key)

    def current(entry: BestEntry) -> bool:
        return now is not None and entry.environment_key == now.environment_key

    # Our own measurements before imports, the present environment before others, newer before older.
    known = max(exact, key=lambda entry: (entry.source == MEASURED, current(entry), entry.measured_at))
    stale: list[Change] = []
    if now is not None and known.fingerprint_key and not current(known):
        stale = changes(store.fingerprint(known.fingerprint_key), now)
    return Answer(
        model=model,
        cluster=cluster,
        workload=workload,
        known=known,
        stale=stale,
        others=[item for item in exact if item is not known],
    )


def _from_near(store: KnowledgeStore, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Answer:
    parameters = float(total_parameters(model))
    candidates = store.best_near(model, parameters, cluster, workload)
    near = nearest(candidates, model, parameters, cluster, workload)
    carried, why_not, misses = _carried(store, near, model, cluster, workload)
    own = store.profile(cluster.key)
    key = own.fingerprint_key if own else ""
    settle = None
    if carried is not None:
        settle = settlement(
            model,
            cluster,
            workload,
            plan=carried.plan,
            trial_gpu_s=carried.trial_gpu_s,
            collective_readings=store.collective_readings(cluster.key, key),
            layer_readings=store.layer_readings(cluster.key, key, model.key, workload.probed.key),
        )
    return Answer(
        model=model,
        cluster=cluster,
        workload=workload,
        known=None,
        near=near,
        carried=carried,
        carried_why_not=why_not,
        misses=misses,
        settle=settle,
    )


def _carried(
    store: KnowledgeStore, near: Sequence[Near], model: ModelSpec, cluster: ClusterSpec, workload: Workload
) -> tuple[Carried | None, str, list[dict[str, object]] | None]:
    """The estimate from the trials behind the nearest entries; from the catalog alone where nothing is near.

    Without one: why, and where nothing fits what nearly does.
    """
    entries = [store.best_entry(item.entry.id) for item in near]
    own = store.profile(cluster.key)
    # The nearest entry's profile on the asked number of nodes, where the hardware is the same.
    known = ((each, entry.cluster) for entry in entries if (each := store.profile(entry.cluster.key)) is not None)
    moved = (moved_profile(each, there, cluster) for each, there in known)
    profile = own or next((each for each in moved if each is not None), None)
    try:
        transfers = [transfer for entry in entries for transfer in transfers_behind(store, entry)]
        found = carry(
            model,
            cluster,
            workload,
            merged(transfers),
            profile,
            measured_network=own is not None,
            same_model=any(entry.model.key == model.key for entry in entries),
            runtime=runtime_of(workload),
        )
        if found is not None:
            return found, "", None
        tables = legal_pieces(model, cluster, workload, runtime=runtime_of(workload))
        nearest_misses(model, cluster, workload, tables, runtime=runtime_of(workload), profile=profile)
    except NothingFitsError as error:
        return None, str(error), error.misses
    except AutotuneError as error:
        return None, str(error), None
    return None, "no legal plan is expected to fit in memory", []


def earlier_transfers(store: KnowledgeStore, tuning: Tuning) -> list[TransferObservation]:
    """What earlier tunings of the same question, and of near ones, showed of the estimate's errors."""
    model, cluster, workload = tuning.model, tuning.cluster, tuning.workload
    parameters = float(total_parameters(model))
    entries = [entry for entry in store.best_exact(model, cluster, workload) if entry.source == MEASURED]
    near = nearest(
        [item for item in store.best_near(model, parameters, cluster, workload) if item.source == MEASURED],
        model, parameters, cluster, workload, limit=MAX_TEACHERS,
    )  # fmt: skip
    known = {entry.id for entry in entries}
    entries += [store.best_entry(item.entry.id) for item in near if item.entry.id not in known]
    try:
        return merged(
            transfer for entry in entries if entry.tuning_id != tuning.id for transfer in transfers_behind(store, entry)
        )
    except MissingMeasurementError:
        return []  # the entry's cluster has no known speeds any more: its trials cannot be judged


def transfers_behind(store: KnowledgeStore, entry: BestEntry) -> list[TransferObservation]:
    """What the trials of the tuning behind an entry teach; nothing where there was none."""
    if entry.tuning_id is None:
        return []
    trials = store.trials(entry.tuning_id)
    return taught(entry.model, entry.cluster, entry.workload, trials, store.profile(entry.cluster.key))
