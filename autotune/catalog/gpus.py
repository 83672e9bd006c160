"""The GPUs in gpus.yaml, clusters of them by shorthand, and a discovered machine with what is known of its GPU."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from autotune.catalog.data import rows, unknown
from autotune.errors import InputError
from autotune.specs import ClusterSpec, Device, DeviceKind, DType, Link, Spec
from autotune.specs.cluster import MAX_DEVICES, Rate
from autotune.specs.model import ByteCount, Count

_SHORTHAND = re.compile(r"(?P<gpu>[a-z0-9][a-z0-9.-]*):(?P<nodes>[1-9][0-9]{0,5})x(?P<gpus>[1-9][0-9]{0,5})")
_FORM = "write GPU:NODESxGPUS_PER_NODE, for example a100-80gb-sxm:128x8"


class GpuEntry(Spec):
    """One GPU as the vendor describes it. `sources` names where each figure is printed.

    Attributes:
        name: the catalog's name (`a100-80gb-sxm`).
        title: the vendor's name.
        kind: CUDA, ROCm or Ascend's NPU.
        drivers: names under which the driver reports the device.
        memory_bytes: what the driver reports as total.
        memory_bytes_per_s: bandwidth of the device's memory.
        peak_flops_per_s: dense peaks by dtype; a dtype the hardware has no matrix unit for is absent.
        intra: the link between devices of a node, one direction, one device.
        gpus_per_node: devices of a node in the vendor's system.
        gpus_per_domain: devices that `intra` joins there, where these are several nodes'.
        inter: the link between nodes of the vendor's reference system, one direction, one NIC; None if it has none.
        nics_per_node: NICs of `gpus_per_node` devices in that system; None if it has none.
        sources: document, place and year by figure.
    """

    name: Annotated[str, Field(min_length=1)]
    title: str
    kind: DeviceKind
    drivers: tuple[str, ...]
    memory_bytes: ByteCount
    memory_bytes_per_s: Rate
    peak_flops_per_s: dict[DType, Rate]
    intra: Link
    gpus_per_node: Count
    gpus_per_domain: Count | None = None
    inter: Link | None = None
    nics_per_node: Count | None = None
    sources: dict[str, str]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.inter is None) != (self.nics_per_node is None):
            raise ValueError("inter and nics_per_node come together")
        return self

    def device(self) -> Device:
        """The device with the catalog's figures."""
        return Device(
            name=self.name,
            kind=self.kind,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            peak_flops_per_s=self.peak_flops_per_s,
            source=f"catalog: {self.sources['peak_flops_per_s']}",
        )


@cache
def gpus() -> tuple[GpuEntry, ...]:
    """All known GPUs, in the file's order."""
    return tuple(GpuEntry.from_data(row, f"gpus.yaml: {row['name']}") for row in rows("gpus.yaml", "gpus"))


def gpu(name: str) -> GpuEntry:
    """The GPU of that name. Raises UnknownNameError with the close or all known names."""
    for entry in gpus():
        if entry.name == name.lower():
            return entry
    raise unknown("GPU", name, [entry.name for entry in gpus()])


def is_shorthand(text: str) -> bool:
    """Whether the text was meant as GPU:NODESxGPUS_PER_NODE (it may still be malformed)."""
    return ":" in text


def cluster_from_shorthand(text: str) -> ClusterSpec:
    """A cluster of the vendor's reference systems, from GPU:NODESxGPUS_PER_NODE.

    The NICs of a node are the reference system's, in proportion to the devices a node. Nodes whose link joins several
    of them form whole domains: of a rack of 72 all are used where the devices fill such racks (or part of one), or 64.

    Raises:
        InputError: malformed text, or several nodes of a GPU that has no reference link between nodes.
        UnknownNameError: a GPU that the catalog does not know.
    """
    match = _SHORTHAND.fullmatch(text.strip().lower())
    if match is None:
        raise InputError("cluster", text, _FORM)
    entry, nodes, gpus_per_node = gpu(match["gpu"]), int(match["nodes"]), int(match["gpus"])
    if nodes * gpus_per_node > MAX_DEVICES:
        raise InputError("cluster", text, f"at most {MAX_DEVICES} devices are understood")
    if nodes > 1 and entry.inter is None:
        raise InputError(
            "cluster",
            text,
            f"{entry.name} has no reference system of several nodes: give a cluster file whose `inter` and "
            "`nics_per_node` describe your network",
        )
    nics = (entry.nics_per_node or 1) * gpus_per_node // entry.gpus_per_node
    return ClusterSpec(
        name=f"{entry.name}:{nodes}x{gpus_per_node}",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpus_per_domain=_domain(entry, nodes, gpus_per_node),
        device=entry.device(),
        intra=entry.intra,
        inter=entry.inter if nodes > 1 else None,
        nics_per_node=max(1, nics) if nodes > 1 else 1,
    )


def _domain(entry: GpuEntry, nodes: int, gpus_per_node: int) -> int | None:
    """Devices of a domain of several such nodes; None where a node is one."""
    most = entry.gpus_per_domain or 0
    whole = nodes * gpus_per_node
    for size in (min(most, whole), 2 ** (most.bit_length() - 1) if most else 0):
        if size > gpus_per_node and size % gpus_per_node == 0 and whole % size == 0:
            return size
    return None


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
