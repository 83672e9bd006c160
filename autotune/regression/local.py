"""A night on this machine: checks one after another on one prober, then tunings where a challenger may win."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.errors import StoreConflictError
from autotune.knowledge.recording import remember
from autotune.ports.regression import RegressionStore
from autotune.ports.store import Prober
from autotune.regression.lifecycle import background_of, deadline_s, end, stand_of
from autotune.regression.protocol import Wanted, is_interrupted, measured
from autotune.regression.selection import retune_budget
from autotune.specs import BestEntry, Tuning
from autotune.specs.regression import AlertChannel, Check, CheckMeasurement, CheckState, series_of
from autotune.tuning.ownership import owner_lives, process_owner
from autotune.tuning.service import OpenProber, TuningService

OnMeasured = Callable[[Check, Wanted, CheckMeasurement], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What was done: the checks, and the tunings that followed from them."""

    checks: Sequence[Check]
    tunings: Sequence[Tuning]


class LocalRegression:
    """Checks entries whose cluster is this machine.

    Args:
        store: keeps everything.
        open_prober: gives the prober for a cluster.
        channels: where incidents are told.
        on_measured: told of every measurement.
    """

    def __init__(
        self,
        store: RegressionStore,
        open_prober: OpenProber,
        *,
        channels: Collection[AlertChannel] = (),
        on_measured: OnMeasured = lambda check, wanted, measurement: None,
    ) -> None:
        self._store, self._open_prober, self._channels = store, open_prober, channels
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
                prober: Prober | None = None
                for entry in group:
                    if left is not None and left <= 0.0:
                        break
                    prober = prober or stack.enter_context(closing(self._open_prober(entry.cluster)))
                    check = self.check(prober, entry, budget_gpu_s=left)
                    checks.append(check)
                    left = None if left is None else left - check.gpu_s
        tunings = self._retune(checks, left) if retune else []
        return Night(checks=checks, tunings=tunings)

    def check(self, prober: Prober, entry: BestEntry, *, budget_gpu_s: float | None = None) -> Check:
        """One check to its end; one that was interrupted a moment ago is gone on with. Raises as `run` does."""
        fingerprint = prober.fingerprint()
        key = self._store.put_fingerprint(fingerprint)
        check = self._begin(entry, key, fingerprint.environment_key, budget_gpu_s)
        background = background_of(self._store, entry, key)
        while (stand := stand_of(self._store, check, background)).wanted is not None:
            wanted = stand.wanted
            outcome = prober.run(wanted.request, deadline_s=deadline_s(entry, wanted.request))
            measurement = measured(wanted, outcome, datetime.now(UTC))
            self._store.save_probe(
                tuning_id=None, cluster=entry.cluster, fingerprint_key=key, request=wanted.request, outcome=outcome
            )
            self._store.add_measurement(check.id, measurement)
            self._on_measured(check, wanted, measurement)
        return end(self._store, check, stand, channels=self._channels, now=datetime.now(UTC))

    def _begin(self, entry: BestEntry, fingerprint_key: str, environment_key: str, budget: float | None) -> Check:
        owner, now = process_owner(), datetime.now(UTC)
        check = Check(
            id=uuid.uuid4().hex,
            entry_id=entry.id,
            series=series_of(entry),
            cluster_key=entry.cluster.key,
            fingerprint_key=fingerprint_key,
            environment_key=environment_key,
            owner=owner,
            budget_gpu_s=budget,
            started_at=now,
        )
        while not self._store.create_check(check):
            running = self._store.checks(series=check.series, state=CheckState.RUNNING, limit=1)
            if running and self._take_over(running[0], check, now):
                return self._store.check(running[0].id)
        return check

    def _take_over(self, old: Check, new: Check, now: datetime) -> bool:
        """Whether a check that a dead process left is gone on with; one of another time is abandoned."""
        if old.pool or (old.owner != new.owner and owner_lives(old.owner)):
            who = f"pool {old.pool}" if old.pool else f"process {old.owner}"
            raise StoreConflictError(f"entry {old.entry_id} is being checked by {who}")
        interrupted = is_interrupted(self._store.measurements(old.id), old.started_at, now)
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
            service = TuningService(self._store, self._open_prober)
            tuning = service.submit(entry.model, entry.cluster, entry.workload, budget=budget)
            self._store.set_check_tuning(check.id, tuning.id)
            tuning = service.run(tuning.id, lambda event: None)
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
