"""Settings to concrete parts: the one place where the packages meet. Heavy imports happen inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.settings import database_file, read_settings

if TYPE_CHECKING:
    from autotune.specs import ClusterSpec
    from autotune.tuning.ports import Prober
    from autotune.tuning.service import TuningService
    from storage import SqlStore


def open_store(url: str | None = None, *, read_only: bool = False) -> SqlStore:
    """The store at `url`, by default the settings'."""
    from storage import open_store as open_sql_store

    chosen = url or read_settings().database_url
    file = database_file(chosen)
    if url is None and file is not None and not read_only:
        file.parent.mkdir(parents=True, exist_ok=True)
    return open_sql_store(chosen, read_only=read_only)


def open_prober(cluster: ClusterSpec) -> Prober:
    """The prober of this machine for a cluster that describes it."""
    from probes.launch import LocalProber

    return LocalProber(cluster, log_dir=read_settings().log_dir)


def open_service(store: SqlStore) -> TuningService:
    """The service over a store and this machine's prober."""
    from autotune.tuning.service import TuningService

    return TuningService(store, open_prober)

