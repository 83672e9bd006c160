"""A night on this machine: checks one after another on a fleet of one, then tunings where a challenger may win."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from autotune.errors import StoreConflictError
from autotune.fleet.advance import owner_lives, process_owner
from autotune.fleet.local import LocalFleet
from autotune.knowledge.recording import remember
from autotune.ports.regression import FleetRegressionStore
from autotune.regression.fleet import OnMeasured, advance_check
from autotune.regression.protocol import is_interrupted
from autotune.regression.selection import retune_budget
from autotune.specs import BestEntry, ClusterSpec, Tuning
from autotune.specs.regression import AlertChannel, Check, CheckState, series_of
from autotune.tuning.request import submit, tuning_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What was done: the checks, and the tunings that followed from them."""

    checks: Sequence[Check]
    tunings: Sequence[Tuning]


class LocalRegression:
    """Checks entries whose cluster is this machine.

    Args:
        store: keeps everything.
        open_fleet: gives this machine as a fleet of one, for a cluster that describes it.
        channels: where incidents are told.
        on_measured: told of every measurement.
    """

    def __init__(
        self,
        store: FleetRegressionStore,
        open_fleet: Callable[[ClusterSpec], LocalFleet],
        *,
        channels: Collection[AlertChannel] = (),
        on_measured: OnMeasured = lambda check, wanted, measurement: None,
    ) -> None:
        self._store, self._open_fleet, self._channels = store, open_fleet, channels
        self._on_measured = on_measured

    def run(self, entries: Sequence[BestEntry], *, budget_gpu_s: float | None = None, retune: bool = True) -> Night:
        """Checks the entries in this order as far as the budget goes, then retunes with what is left of it.

        Raises:
            StoreConflictError: another living process checks one of them.
            ProberError: there is nothing to measure with.
        """
        checks: list[Check] = []
        left = budget_gpu_s
        for group in _by_cluster(entries):
            with ExitStack() as stack:
                fleet: LocalFleet | None = None
                for entry in group:
                    if left is not None and left <= 0.0:
                        break
                    fleet = fleet or stack.enter_context(closing(self._open_fleet(entry.cluster)))
                    check = self.check(fleet, entry, budget_gpu_s=left)
                    checks.append(check)
                    left = None if left is None else left - check.gpu_s
        tunings = self._retune(checks, left) if retune else []
        return Night(checks=checks, tunings=tunings)

    def check(self, fleet: LocalFleet, entry: BestEntry, *, budget_gpu_s: float | None = None) -> Check:
        """One check to its end; one that was interrupted a moment ago is gone on with. Raises as `run` does."""
        store, node = self._store, fleet.join()
        check = self._begin(entry, node.fingerprint_key, node.environment_key, budget_gpu_s)
        fleet.until(
            lambda: store.check(check.id).state is not CheckState.RUNNING,
            lambda: advance_check(
                store,
                fleet.queue,
                fleet.merge,
                check,
                pool=fleet.pool,
                channels=self._channels,
                on_measured=self._on_measured,
            ),
        )
        return store.check(check.id)

    def _begin(self, entry: BestEntry, fingerprint_key: str, environment_key: str, budget: float | None) -> Check:
        check = Check(
            id=uuid.uuid4().hex[:16],
            entry_id=entry.id,
            series=series_of(entry),
            cluster_key=entry.cluster.key,
            fingerprint_key=fingerprint_key,
            environment_key=environment_key,
            owner=process_owner(),
            budget_gpu_s=budget,
            started_at=self._store.now(),
        )
        while not self._store.create_check(check):
            running = self._store.checks(series=check.series, state=CheckState.RUNNING, limit=1)
            if running and self._take_over(running[0], check):
                return self._store.check(running[0].id)
        return check

    def _take_over(self, old: Check, new: Check) -> bool:
        """Whether a check that a dead process left is gone on with; one of another time is abandoned."""
        if old.pool or (old.owner != new.owner and owner_lives(old.owner)):
            who = f"pool {old.pool}" if old.pool else f"process {old.owner}"
            raise StoreConflictError(f"entry {old.entry_id} is being checked by {who}")
        interrupted = is_interrupted(self._store.measurements(old.id), old.started_at, new.started_at)
        if interrupted or old.environment_key != new.environment_key:
            self._store.abandon_check(old.id)
            return False
        return self._store.claim_check(old.id, new.owner, expected_owner=old.owner)

    def _retune(self, checks: Sequence[Check], left_gpu_s: float | None) -> list[Tuning]:
        """The greatest loss first."""
        tunings: list[Tuning] = []
        for check in sorted(checks, key=lambda item: item.result.effect if item.result else 0.0):
            entry = self._store.best_entry(check.entry_id)
            budget = retune_budget(check, entry, left_gpu_s)
            if budget is None:
                continue
            tuning = submit(self._store, tuning_of(entry.model, entry.cluster, entry.workload, budget=budget))
            self._store.set_check_tuning(check.id, tuning.id)
            with closing(self._open_fleet(entry.cluster)) as fleet:
                tuning = fleet.run(tuning.id)
            remember(self._store, tuning)
            tunings.append(tuning)
            left_gpu_s = None if left_gpu_s is None else left_gpu_s - tuning.gpu_s_spent
        return tunings


def _by_cluster(entries: Sequence[BestEntry]) -> list[list[BestEntry]]:
    """Entries of one cluster together: they share warm ranks."""
    groups: dict[str, list[BestEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.cluster.to_json(), []).append(entry)
    return list(groups.values())
