"""Adding what the catalog knows to what a machine reports about itself."""

from __future__ import annotations

from autotune.catalog.gpus import GpuEntry, gpus
from autotune.specs import ClusterSpec

# A device of a known name may be given less than its memory, never more (this much for rounding).
_MEMORY_TOLERANCE = 0.05


def recognise(driver_name: str, memory_bytes: int) -> GpuEntry | None:
    """The GPU of that driver name with at least that memory; None if it is not known (then nothing is guessed)."""
    name = driver_name.lower().removeprefix("nvidia ").strip()
    for entry in gpus():
        fits = memory_bytes <= entry.memory_bytes * (1 + _MEMORY_TOLERANCE)
        if fits and name in {known.lower() for known in entry.drivers}:
            return entry
    return None


def recognised(cluster: ClusterSpec) -> ClusterSpec:
    """The discovered cluster with a known GPU's name, peaks, bandwidth and link; unchanged if it is not known.

    The memory stays as discovered, and the link gets a speed only if it is of the kind that the catalog gives.
    """
    entry = recognise(cluster.device.name, cluster.device.memory_bytes)
    if entry is None:
        return cluster
    source = f"{cluster.device.name} ({cluster.device.source.partition(';')[0]}); {entry.device().source}"
    device = entry.device().model_copy(update={"memory_bytes": cluster.device.memory_bytes, "source": source})
    intra = entry.intra if entry.intra.name.startswith(cluster.intra.name) else cluster.intra
    return cluster.model_copy(update={"device": device, "intra": intra})
