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


_LATER = ("node_cores", "gpus_per_domain", "nodes_per_pod", "spine", "rails")


class DeviceKind(StrEnum):
    """What runs the kernels. Decides torch's device type and the collective backend (gloo or NCCL/RCCL).

    An Ascend NPU can be described and estimated; nothing measures on it.
    """

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"
    NPU = "npu"


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

    Where `intra` joins the devices of several nodes (the NVLink of a rack), `gpus_per_domain` says of how many devices;
    None says of one node's. `inter` then joins the domains. Of a larger network `nodes_per_pod` nodes reach each other
    over `inter`, and pods over `spine`, whose `bytes_per_s` is what one NIC has of it, one direction. With `rails` the
    NICs of one number meet on a switch of their own, and messages between others cross the node's `intra` first.
    """

    name: Name
    nodes: Count
    gpus_per_node: Count
    device: Device
    intra: Link
    inter: Link | None = None
    nics_per_node: Count = 1
    node_cores: Count | None = None
    gpus_per_domain: Count | None = None
    nodes_per_pod: Count | None = None
    spine: Link | None = None
    rails: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.gpus_per_domain or self.gpus_per_node) % self.gpus_per_node:
            allowed = f"gpus_per_domain must be a multiple of gpus_per_node ({self.gpus_per_node}): whole nodes"
            raise mismatch("gpus_per_domain", self.gpus_per_domain, allowed)
        if (self.nodes_per_pod is None) != (self.spine is None):
            raise mismatch("spine", self.spine and self.spine.name, "nodes_per_pod and spine come together")
        if self.rails and self.nics_per_node < 2:
            raise mismatch("rails", True, f"rails need several NICs a node, not {self.nics_per_node}")
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
    def domain(self) -> int:
        """The number of devices that `intra` joins."""
        return min(self.gpus_per_domain or self.gpus_per_node, self.devices)

    @property
    def key(self) -> str:
        """Identifies the hardware, whatever its name."""
        # A field that was added later does not change the keys of stored clusters that lack it.
        absent = {name for name in _LATER if not getattr(self, name)}
        return self.digest(without=frozenset({"name", *absent}))
