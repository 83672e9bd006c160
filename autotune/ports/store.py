"""What the rooms below need from outside: a Store that keeps everything and remembers best-known plans, and a Prober
that measures. storage and probes implement them.

Rules that implementers must keep stand in the docstrings; tests/contract checks every Store against them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Protocol

from autotune.specs import (
    BestEntry,
    ClusterSpec,
    CollectiveReading,
    Failure,
    Fingerprint,
    LayerReading,
    ModelSpec,
    NearEntry,
    ProbeOutcome,
    ProbeProgress,
    ProbeRequest,
    Profile,
    StepReading,
    Trial,
    Tuning,
    Workload,
)
from autotune.specs.imported import ImportBatch, ImportedReading, ImportedRun

OnProgress = Callable[[ProbeProgress], None]


class Prober(Protocol):
    """Runs probes on the devices of one cluster, one at a time."""

    def fingerprint(self) -> Fingerprint:
        """The environment of the ranks. Starts them if needed. Raises ProberError if that cannot be done."""

    def run(self, request: ProbeRequest, *, deadline_s: float, on_progress: OnProgress | None = None) -> ProbeOutcome:
        """Runs one probe to its end, which comes within `deadline_s` (plus a few seconds to kill ranks).

        Never raises for what happens in the ranks: an OOM, hang, crash or communication error is a
        `Failure` in the outcome. Raises ProberError only if there is nothing to measure with.
        """

    def close(self) -> None:
        """Ends all ranks. Leaves no process behind. May be called twice."""


class Store(Protocol):
    """Keeps everything. Each method is one transaction; what it returned is durable.

    Raises StoreReadOnlyError, StoreNewerError or StoreError when the database cannot be used, UnknownNameError for
    ids that do not exist, and StoreConflictError when a rule about ownership or state is broken.
    """

    def put_model(self, model: ModelSpec, *, owner: str = "", only_own: bool = False) -> None:
        """Stores a model by name, which is `owner`'s then; one of the same name is replaced for new requests only.

        With `only_own`, raises StoreConflictError where somebody else's has the name. Without an owner it belongs to
        whoever operates this.
        """

    def model(self, name: str) -> ModelSpec:
        """The stored model of that name."""

    def put_cluster(self, cluster: ClusterSpec, *, owner: str = "", only_own: bool = False) -> None:
        """Stores a cluster as `put_model` does a model."""

    def cluster(self, name: str) -> ClusterSpec:
        """The stored cluster of that name."""

    def models(self) -> Sequence[ModelSpec]:
        """All stored models, by name."""

    def clusters(self) -> Sequence[ClusterSpec]:
        """All stored clusters, by name."""

    def put_fingerprint(self, fingerprint: Fingerprint) -> str:
        """Stores it once; returns its key."""

    def fingerprint(self, key: str) -> Fingerprint:
        """The fingerprint of that key."""

    def create_tuning(self, tuning: Tuning) -> None:
        """Stores a new tuning. Raises StoreConflictError if the id exists."""

    def tuning(self, tuning_id: str) -> Tuning:
        """The tuning of that id (a unique prefix of at least 4 characters will do)."""

    def tunings(self, limit: int = 50) -> Sequence[Tuning]:
        """The newest tunings, newest first."""

    def save_tuning(self, tuning: Tuning, *, expected_owner: str | None = None) -> None:
        """Replaces the mutable part (state, message, stop_reason, owner, updated_at).

        GPU-seconds are added by `finish_trial` and `save_probe` alone, so that a stale record cannot take any back.

        With `expected_owner`, raises StoreConflictError unless the stored owner still is that one.
        """

    def start_trial(self, trial: Trial) -> None:
        """Stores a RUNNING trial before it runs. (tuning_id, number) is unique."""

    def finish_trial(
        self,
        trial_id: str,
        *,
        reading: StepReading | None,
        failure: Failure | None,
        outcome_gpu_s: float,
        setup_s: float,
        fingerprint_key: str,
    ) -> Trial:
        """Ends a RUNNING trial: complete or pruned with a reading, failed with a failure; adds its GPU-seconds to
        its tuning. Raises StoreConflictError if it has ended already: a result is never overwritten.
        """

    def trials(self, tuning_id: str) -> Sequence[Trial]:
        """The tuning's trials by number."""

    def save_probe(
        self,
        *,
        tuning_id: str | None,
        cluster: ClusterSpec,
        fingerprint_key: str,
        request: ProbeRequest,
        outcome: ProbeOutcome,
    ) -> str:
        """Stores a probe run with all its readings; adds its GPU-seconds to the tuning; returns the run's id."""

    def collective_readings(self, cluster_key: str, fingerprint_key: str) -> Sequence[CollectiveReading]:
        """All readings for that cluster and fingerprint, oldest first."""

    def layer_readings(
        self, cluster_key: str, fingerprint_key: str, model_key: str, workload_key: str
    ) -> Sequence[LayerReading]:
        """All readings for that model, workload, cluster and fingerprint, oldest first."""

    def save_profile(self, profile: Profile) -> None:
        """Stores a new version of the cluster's profile."""

    def profile(self, cluster_key: str, fingerprint_key: str | None = None) -> Profile | None:
        """The newest profile of the cluster (under the fingerprint, if one is given)."""

    def best_trials(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        workload: Workload,
        limit: int = 10,
        *,
        before: datetime | None = None,
    ) -> Sequence[Trial]:
        """Complete trials of any tuning for the same model, cluster and workload keys, fastest first.

        With `before` only those that had ended by then.
        """

    def save_import(
        self,
        batch: ImportBatch,
        runs: Iterable[ImportedRun],
        readings: Iterable[ImportedReading],
        *,
        replaces: Sequence[str] = (),
    ) -> None:
        """Stores an imported file with all its rows, in place of the files with the digests `replaces`, or nothing.

        Raises StoreConflictError: that content is stored already.
        """

    def imports(self) -> Sequence[ImportBatch]:
        """All imported files, oldest first."""

    def runs_of_import(self, sha256: str) -> Iterator[ImportedRun]:
        """The runs of one imported file, in its order, a few at a time."""

    def imported_runs(self, source: str) -> Sequence[ImportedRun]:
        """All runs of a source of imports, in the order of their import. Raises UnknownNameError for an unknown one.

        What was imported comes back here alone: no other method returns it.
        """

    def imported_readings(self, source: str, cluster_key: str) -> Sequence[CollectiveReading]:
        """A source's collective readings on that cluster, oldest first. Raises UnknownNameError."""


class KnowledgeStore(Store, Protocol):
    """A Store that remembers. Each method is one transaction."""

    def put_best(self, entry: BestEntry, *, pooled: bool = False) -> BestEntry:
        """Stores an entry. It takes the place of the current one of its model, cluster, workload, environment and
        source if it is the same plan (measured again), a faster one, or `pooled` from all runs of the question; else
        it is kept as history, superseded at once. An entry equal to a stored one (same tuning, plan and
        figures) is not stored twice.
        """

    def best_entry(self, entry_id: int) -> BestEntry:
        """The entry of that id. Raises UnknownNameError."""

    def best_exact(self, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Sequence[BestEntry]:
        """Current entries for exactly that question, one an environment and source, newest measurement first."""

    def best_near(
        self, model: ModelSpec, parameters: float, cluster: ClusterSpec, workload: Workload, *, limit: int = 20
    ) -> Sequence[NearEntry]:
        """Current entries on the same device and dtype that may be near: the same model's at the nearest numbers
        of devices and sequence lengths, and other models' of the nearest sizes; `limit` of each kind on either
        side. Unordered; as quick with a million entries as with a few.
        """

    def best_page(
        self,
        *,
        model: str | None = None,
        cluster: str | None = None,
        device: str | None = None,
        source: str | None = None,
        history: bool = False,
        before: int | None = None,
        limit: int = 50,
    ) -> Sequence[BestEntry]:
        """Entries by falling id, current ones only unless `history`."""

    def newest_fingerprint(self, cluster_key: str) -> Fingerprint | None:
        """The environment of the newest measurement on that cluster."""
