"""Settings to concrete parts: the one place where the packages meet. Heavy imports happen inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.errors import InputError
from autotune.settings import database_file, read_settings

ELSEWHERE = "`autotune plan` ranks plans without any hardware"

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


def require_local(cluster: ClusterSpec) -> None:
    """Refuses a cluster that this machine is not: several nodes, or more GPUs than it has.

    Raises:
        InputError: says what this machine has, and that plans can be ranked without hardware.
    """
    from autotune.specs import DeviceKind
    from probes.discover import gpus

    if cluster.nodes > 1:
        raise InputError(
            "--cluster",
            cluster.name,
            f"this command measures on one machine, not on {cluster.nodes} nodes; {ELSEWHERE}",
        )
    if cluster.device.kind is not DeviceKind.CPU:
        found = len(gpus())
        if found < cluster.devices:
            raise InputError(
                "--cluster", cluster.name, f"it has {cluster.devices} GPUs and this machine has {found}; {ELSEWHERE}"
            )


def open_prober(cluster: ClusterSpec) -> Prober:
    """The prober of this machine for a cluster that describes it. Raises InputError for another cluster."""
    from probes.launch import LocalProber

    require_local(cluster)
    return LocalProber(cluster, log_dir=read_settings().log_dir)


def open_service(store: SqlStore) -> TuningService:
    """The service over a store and this machine's prober."""
    from autotune.tuning.service import TuningService

    return TuningService(store, open_prober)
