"""What the service needs to remember best-known plans: a KnowledgeStore. storage implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.specs import BestEntry, ClusterSpec, Fingerprint, ModelSpec, NearEntry, Workload
from autotune.tuning.ports import Store


class KnowledgeStore(Store, Protocol):
    """A Store that remembers. Each method is one transaction."""

    def put_best(self, entry: BestEntry) -> BestEntry:
        """Stores an entry. It takes the place of the current one of its model, cluster, workload, environment and
        source if it is the same plan (measured again) or a faster one; else it is kept as history, superseded
        at once. An entry equal to a stored one (same tuning, plan and figures) is not stored twice.
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
