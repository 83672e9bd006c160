"""Whether a log's GPUs are those of the cluster that the user names."""

from __future__ import annotations

from autotune.catalog.recognition import recognise
from autotune.imports.logs import LogFile
from autotune.specs import ClusterSpec

ANY_MEMORY = 1
"""A log tells a GPU's name; its memory is not asked for."""


def require_gpu(file: LogFile, line: int, name: str, cluster: ClusterSpec) -> None:
    """Raises InputError if the catalog knows the GPU of that driver name, and it is another one than the cluster's."""
    entry = recognise(name, ANY_MEMORY)
    if entry is not None and cluster.device.name not in {entry.name, name}:
        raise file.bad(line, "GPU", name, f"--cluster {cluster.name} has {cluster.device.name}, this is {entry.name}")
