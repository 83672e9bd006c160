"""ClusterSpec: the devices and the links between them, as bought. What they really reach is a profile."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from autotune.specs.base import Name, Spec, mismatch
from autotune.specs.model import ByteCount, Count
from autotune.specs.workload import DType

MAX_DEVICES = 10_000_000
"""A hundred times the largest cluster that was built; the layouts of more take long to list."""

Rate = Annotated[float, Field(ge=1, le=1e24)]
"""A rate in units a second. Any hardware's lies in these bounds, and seconds of any step stay finite in them."""

Latency = Annotated[float, Field(gt=0, le=60)]


class DeviceKind(StrEnum):
    """What runs the kernels. Decides torch's device type and the collective backend (gloo or NCCL/RCCL)."""

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


class Device(Spec):
    """One device (a GPU, or one CPU rank). Figures are the vendor's; None or absent means not known.

    `peak_flops_per_s` holds dense matrix peaks by dtype. `memory_bytes` is what a rank may use at most.
    """

    name: Name
    kind: DeviceKind
    memory_bytes: ByteCount
    memory_bytes_per_s: Rate | None = None
    peak_flops_per_s: dict[DType, Rate] = {}
    source: str = ""


class Link(Spec):
    """One level of the network. `bytes_per_s` is one direction, for one device (intra) or one NIC (inter)."""

    name: Name
    bytes_per_s: Rate | None = None
    latency_s: Latency | None = None
    source: str = ""


class ClusterSpec(Spec):
    """`nodes` x `gpus_per_node` equal devices; `intra` joins those of a node, `inter` the nodes.

    The devices of a node share `nics_per_node` NICs of `inter.bytes_per_s` each. CPU ranks
    share the `node_cores` of their node; None says that each device computes on its own.
    """

    name: Name
    nodes: Count
    gpus_per_node: Count
    device: Device
    intra: Link
    inter: Link | None = None
    nics_per_node: Count = 1
    node_cores: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nodes > 1 and self.inter is None:
            raise mismatch("inter", None, "a cluster of several nodes needs inter, the link between them")
        if self.devices > MAX_DEVICES:
            allowed = f"nodes * gpus_per_node is {self.devices}; at most {MAX_DEVICES} devices are understood"
            raise mismatch("nodes", self.nodes, allowed)
        return self

    @property
    def devices(self) -> int:
        """The number of devices, N."""
        return self.nodes * self.gpus_per_node

    @property
    def key(self) -> str:
        """Identifies the hardware, whatever its name."""
        # A field that was added later does not change the keys of stored clusters that lack it.
        later = () if self.node_cores is not None else ("node_cores",)
        return self.digest(without=frozenset({"name", *later}))
