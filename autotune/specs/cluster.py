"""ClusterSpec: the devices and the links between them, as bought. What they really reach is a profile."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from autotune.specs.base import Spec
from autotune.specs.model import Count
from autotune.specs.workload import DType

Positive = Annotated[float, Field(gt=0)]


class DeviceKind(StrEnum):
    """What runs the kernels. Decides torch's device type and the collective backend (gloo or NCCL/RCCL)."""

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


class Device(Spec):
    """One device (a GPU, or one CPU rank). Figures are the vendor's; None or absent means not known.

    `peak_flops_per_s` holds dense matrix peaks by dtype. `memory_bytes` is what a rank may use at most.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: DeviceKind
    memory_bytes: Count
    memory_bytes_per_s: Positive | None = None
    peak_flops_per_s: dict[DType, Positive] = {}
    source: str = ""


class Link(Spec):
    """One level of the network. `bytes_per_s` is one direction, for one device (intra) or one NIC (inter)."""

    name: Annotated[str, Field(min_length=1)]
    bytes_per_s: Positive | None = None
    latency_s: Positive | None = None
    source: str = ""


class ClusterSpec(Spec):
    """`nodes` x `gpus_per_node` equal devices; `intra` joins those of a node, `inter` the nodes.

    The devices of a node share `nics_per_node` NICs of `inter.bytes_per_s` each.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    nodes: Count
    gpus_per_node: Count
    device: Device
    intra: Link
    inter: Link | None = None
    nics_per_node: Count = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nodes > 1 and self.inter is None:
            raise ValueError("a cluster of several nodes needs inter, the link between them")
        return self

    @property
    def devices(self) -> int:
        """The number of devices, N."""
        return self.nodes * self.gpus_per_node

    @property
    def key(self) -> str:
        """Identifies the hardware, whatever its name."""
        return self.digest(without=frozenset({"name"}))
