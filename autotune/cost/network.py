"""Collective times on a two-level network: group geometry, shared NICs, catalog links or fitted ones.

A group is `size` ranks, `stride` apart; all groups of an axis communicate at once, as in a training step. Times
are alpha + bytes * beta, where bytes is nccl-tests' size: the full buffer of a rank (the gathered one for
all-gather and reduce-scatter).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autotune.cost.layouts import distinct
from autotune.cost.table import FloatColumn
from autotune.errors import MissingMeasurementError
from autotune.specs import ClusterSpec, CollectiveOp, Link, LinkFit, Profile

INTRA_LATENCY_S = 5e-6
"""Assumption where the catalog has no latency for the link inside a node: one hop of NCCL over NVLink or PCIe."""

INTER_LATENCY_S = 12e-6
"""Assumption where the catalog has no latency for the link between nodes: one hop of NCCL over RDMA."""

LINK_EFFICIENCY = 0.8
"""Assumption: share of a catalog link's rate that a collective's bus bandwidth reaches at large sizes."""


class Cost(NamedTuple):
    """Seconds of a collective = alpha_s + bytes * s_per_byte."""

    alpha_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a group lies on the nodes: `nodes` spanned by the widest group, `local` members on a node of it."""

    size: int
    nodes: int
    local: float

    @property
    def crosses_nodes(self) -> bool:
        """Whether the group uses the link between nodes."""
        return self.nodes > 1


@lru_cache(maxsize=65536)
def geometry(gpus_per_node: int, devices: int, size: int, stride: int) -> Geometry:
    """The geometry of groups of `size` ranks, `stride` apart, rank order filling node after node.

    Groups need not align with nodes (6 GPUs a node, groups of 4): the group that spans most nodes counts, since
    the slowest one sets the pace.
    """
    blocks = max(devices // (size * stride), 1)
    starts = np.add.outer(np.arange(min(blocks, gpus_per_node)) * size * stride, np.arange(min(stride, gpus_per_node)))
    starts = starts[starts + (size - 1) * stride < devices].reshape(-1, 1)
    nodes = (starts + np.arange(size) * stride) // gpus_per_node
    spanned = 1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    widest = int(spanned.max())
    return Geometry(size, widest, size / widest)


def ring_steps(op: CollectiveOp, size: int) -> int:
    """Latency terms of a ring: 2(n-1) for all-reduce, n-1 for the others, 1 for send/recv."""
    if op is CollectiveOp.SEND_RECV:
        return 1
    return (size - 1) * (2 if op is CollectiveOp.ALL_REDUCE else 1)


def ring_traffic(op: CollectiveOp, size: int) -> float:
    """Bytes through each rank of a ring per byte of size: 2(n-1)/n for all-reduce, (n-1)/n, and 1 for send/recv."""
    return 1.0 if op is CollectiveOp.SEND_RECV else ring_steps(op, size) / size


class Network:
    """Costs of collectives on one cluster, from fitted links where a profile has them, else from the catalog.

    A fitted layout is used as it is. Another layout of the same link level takes the ring formula with the
    nearest fitted layout's latency and bus bandwidth.
    """

    def __init__(self, cluster: ClusterSpec, profile: Profile | None = None) -> None:
        self._cluster = cluster
        self._fits = profile.links if profile else ()
        self._costs: dict[tuple[CollectiveOp, int, int], Cost] = {}

    def columns(self, op: CollectiveOp, sizes: FloatColumn, strides: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
        """(alpha_s, s_per_byte) for many groups at once."""
        base = int(strides.max(initial=1)) + 1
        codes, inverse = distinct((sizes * base + strides).astype(np.int64))
        costs = np.array([self.cost(op, int(code) // base, int(code) % base) for code in codes]).reshape(-1, 2)
        return costs[inverse, 0], costs[inverse, 1]

    def cost(self, op: CollectiveOp, size: int, stride: int) -> Cost:
        """The cost of one operation on groups of `size`, `stride` apart; nothing for a group of one.

        Raises:
            MissingMeasurementError: the link that the group uses is neither measured nor in the catalog.
        """
        if size <= 1:
            return Cost(0.0, 0.0)
        key = (op, size, stride)
        if key not in self._costs:
            self._costs[key] = self._fitted(*key) or self._from_catalog(*key)
        return self._costs[key]

    def _geometry(self, size: int, stride: int) -> Geometry:
        return geometry(self._cluster.gpus_per_node, self._cluster.devices, size, stride)

    def _fitted(self, op: CollectiveOp, size: int, stride: int) -> Cost | None:
        crosses = self._geometry(size, stride).crosses_nodes
        level = [fit for fit in self._fits if fit.crosses_nodes == crosses]
        same_op = [fit for fit in level if fit.op is op]
        if not level:
            return None
        fit = min(same_op or level, key=lambda fit: _distance(fit, size, stride))
        return Cost(fit.latency_s * ring_steps(op, size), ring_traffic(op, size) / fit.bytes_per_s)

    def _from_catalog(self, op: CollectiveOp, size: int, stride: int) -> Cost:
        """Two levels: T = V_node / B_node + V_cross / B_cross, the NICs of a node shared by all its ranks."""
        group = self._geometry(size, stride)
        inside = 1.0 / _rate(self._cluster.intra, self._cluster) if group.local > 1 else 0.0
        inside_latency = self._cluster.intra.latency_s or INTRA_LATENCY_S
        if not group.crosses_nodes:
            return Cost(inside_latency * ring_steps(op, size), ring_traffic(op, size) * inside)
        assert self._cluster.inter is not None  # ClusterSpec: several nodes have a link between them
        active = min(self._cluster.gpus_per_node, self._cluster.devices)
        if op is CollectiveOp.SEND_RECV:
            active = math.ceil(active / group.local)  # along a chain only a node's last member sends across
        rate = _rate(self._cluster.inter, self._cluster) * min(1.0, self._cluster.nics_per_node / active)
        across_latency = self._cluster.inter.latency_s or INTER_LATENCY_S
        v_node, v_cross = _two_level_traffic(op, group)
        steps = ring_steps(op, group.nodes) * across_latency
        if op is not CollectiveOp.SEND_RECV and group.local > 1:
            steps += ring_steps(op, math.ceil(group.local)) * inside_latency
        return Cost(steps, v_node * inside + v_cross / rate)


def _two_level_traffic(op: CollectiveOp, group: Geometry) -> tuple[float, float]:
    """(bytes inside the node, bytes across) through one rank, per byte of size.

    Hierarchical rings: scatter inside the node, ring over nodes with 1/local of the buffer a rank, gather inside.
    All-to-all sends 1/n of the buffer to each other member.
    """
    n, local = group.size, group.local
    if op is CollectiveOp.SEND_RECV:
        return 0.0, 1.0
    if op is CollectiveOp.ALL_TO_ALL:
        return (local - 1) / n, (n - local) / n
    factor = 2.0 if op is CollectiveOp.ALL_REDUCE else 1.0
    return factor * (local - 1) / local, factor * (group.nodes - 1) / group.nodes / local


def _distance(fit: LinkFit, size: int, stride: int) -> float:
    """0 for the same layout; else how many doublings of group size and stride lie between."""
    return abs(math.log2(fit.group_size / size)) + abs(math.log2(fit.stride / stride))


def _rate(link: Link, cluster: ClusterSpec) -> float:
    """The assumed bus bandwidth of a catalog link, bytes a second."""
    if link.bytes_per_s is None:
        raise MissingMeasurementError(
            f"the rate of link {link.name!r} of cluster {cluster.name!r} is not known; measure it with "
            "`autotune probe collective`, or give bytes_per_s in the cluster's file"
        )
    return link.bytes_per_s * LINK_EFFICIENCY
