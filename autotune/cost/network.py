"""Collective times on a two-level network: group geometry, shared NICs, catalog links or fitted ones.

A group is `size` ranks, `stride` apart; all groups of an axis communicate at once, as in a training step. Times
are alpha + bytes * beta, where bytes is nccl-tests' size: the full buffer of a rank (the gathered one for
all-gather and reduce-scatter).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from autotune.cost.framework import TORCH, Framework
from autotune.cost.table import FloatColumn, distinct
from autotune.errors import MissingMeasurementError
from autotune.specs import ClusterSpec, CollectiveOp, Link, LinkFit, Profile

# Collectives over the links inside a node: what starting one, each step of its ring and each byte costs.
#
# time = start + step * steps + traffic / (rate * share * (1 - few / n)), rate the catalog's: a group of few ranks
# cannot fill all of a device's links. The constants were fitted (robust least squares in log time) to 1,927 published
# readings of 1-600 MB: NVLink 3 on A100 (273), 4 on H100 and H200 (924), 5 on B200 (730). They meet them within 9, 11
# and 15 % on average; 15 us a step and 0.8 of the rate, which stood here before, were off by 23, 49 and 52 %.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Constants of one kind of link. `share` is what large groups reach of the rate, `few` what small ones lack."""

    start_s: float
    step_s: float
    share: float
    few: float


_KNOWN = {
    "NVLink 3": Ring(start_s=28e-6, step_s=1.7e-6, share=0.77, few=0.44),
    "NVLink 4": Ring(start_s=12e-6, step_s=0.8e-6, share=0.76, few=0.56),
    "NVLink 5": Ring(start_s=14e-6, step_s=1.1e-6, share=0.68, few=0.67),
}
UNREAD = Ring(start_s=20e-6, step_s=1.5e-6, share=0.8, few=0.45)
"""Assumption for links that nobody read: between those above."""


def ring_of(link: Link) -> Ring:
    """The constants of the link's kind, UNREAD if it is none of those measured."""
    return _KNOWN.get(link.name, UNREAD)


INTER_LATENCY_S = 12e-6
"""Assumption where the catalog has no latency for the link between nodes: one hop of NCCL over RDMA."""

LINK_EFFICIENCY = 0.8
"""Assumption: share of a link's rate between nodes that a collective's bus bandwidth reaches at large sizes."""

USUAL_STEP_S = 0.1e-3
"""Latency of one ring step between nodes up to which a host does not notice (cost.framework, `slow_step_host`)."""


SLOWEST_STEP_S = 0.35e-3
"""The slowest step of that sweep: nothing is known of a host beyond it."""


class Cost(NamedTuple):
    """Seconds of a collective = alpha_s + bytes * s_per_byte."""

    alpha_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a group lies on the nodes: `nodes` spanned by the widest group, `local` members on a node of it, `active`
    ranks of a node in any of the groups.
    """

    size: int
    nodes: int
    local: float
    active: int

    @property
    def crosses_nodes(self) -> bool:
        """Whether the group uses the link between nodes."""
        return self.nodes > 1


@lru_cache(maxsize=16384)
def geometry(gpus_per_node: int, devices: int, size: int, stride: int) -> Geometry:
    """The geometry of groups of `size` ranks, `stride` apart, rank order filling node after node.

    Groups need not align with nodes (6 GPUs a node, groups of 4): the group that spans most nodes counts, since
    the slowest one sets the pace.
    """
    blocks = max(devices // (size * stride), 1)
    starts = np.add.outer(np.arange(min(blocks, gpus_per_node)) * size * stride, np.arange(min(stride, gpus_per_node)))
    starts = starts[starts + (size - 1) * stride < devices].reshape(-1, 1)
    if not len(starts):  # a group wider than the cluster: runs of elsewhere may be laid out as nobody here can say
        starts = np.zeros((1, 1), dtype=np.int64)
    nodes = (starts + np.arange(size) * stride) // gpus_per_node
    spanned = 1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    widest = int(spanned.max())
    return Geometry(size, widest, size / widest, int(np.count_nonzero(nodes == 0)))


def distinct_share(places: int, copies: int) -> float:
    """Expected number of different places of so many, drawn at random for each copy, over the copies."""
    return places * (1.0 - (1.0 - 1.0 / places) ** copies) / copies


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

    def __init__(self, cluster: ClusterSpec, profile: Profile | None = None, framework: Framework = TORCH) -> None:
        self._cluster, self._framework = cluster, framework
        self._fits = profile.links if profile else ()
        self._costs: dict[tuple[CollectiveOp, int, int], Cost] = {}

    @cached_property
    def host_delay_s(self) -> float:
        """Seconds that a collective costs the host for each of its ranks, on a network of unusually long steps.

        Seen in the nanotron sweep alone, and 0 elsewhere: where a step across nodes read as 0.25-0.32 ms instead of
        0.03-0.08, each tensor-parallel collective took 0.3 ms of host time a rank, inside a node as well.
        """
        if not self._framework.slow_step_host:
            return 0.0
        steps = [
            step_latency_s(fit, self._geometry(fit.group_size, fit.stride)) for fit in self._fits if fit.crosses_nodes
        ]
        slower = min(max(steps, default=0.0), SLOWEST_STEP_S) - USUAL_STEP_S
        return self._framework.slow_step_host * max(0.0, slower)

    def columns(self, op: CollectiveOp, sizes: FloatColumn, strides: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
        """(alpha_s, s_per_byte) for many groups at once."""
        base = int(strides.max(initial=1)) + 1
        codes, inverse = distinct((sizes * base + strides).astype(np.int64))
        costs = np.array([self.cost(op, int(code) // base, int(code) % base) for code in codes]).reshape(-1, 2)
        return costs[inverse, 0], costs[inverse, 1]

    def crossings(self, sizes: FloatColumn, strides: FloatColumn) -> FloatColumn:
        """How many of the steps along a chain of each such group cross nodes."""
        pairs = zip(sizes.astype(np.int64).tolist(), strides.astype(np.int64).tolist(), strict=True)
        return np.array([self._geometry(size, stride).nodes - 1.0 for size, stride in pairs], dtype=np.float64)

    def dispatched_s_per_byte(
        self, sizes: FloatColumn, strides: FloatColumn, top_k: int, most_nodes: int
    ) -> FloatColumn:
        """Seconds a byte of an all-to-all of the top_k copies of each token.

        A token goes to a rank or node once, whatever number of its experts is there, where the framework sends it so;
        with `most_nodes` its experts lie on so many nodes at most. What a node gets is handed on inside it.
        """
        once = self._framework.dispatches_once
        rates = []
        for size, stride in zip(sizes.astype(np.int64).tolist(), strides.astype(np.int64).tolist(), strict=True):
            whole, group = self.cost(CollectiveOp.ALL_TO_ALL, size, stride).s_per_byte, self._geometry(size, stride)
            ranks = distinct_share(size, top_k) if once else 1.0
            if not group.crosses_nodes:
                rates.append(whole * ranks)
                continue
            few = distinct_share(group.nodes, top_k) if once else 1.0
            few = min(few, most_nodes / top_k) if most_nodes else few
            inside = ranks * (size - 1) / max(size, 1) * (self._inside_s_per_byte() or 0.0)
            rates.append(max(whole * few, min(inside, whole)))
        return np.array(rates, dtype=np.float64)

    def cost(self, op: CollectiveOp, size: int, stride: int) -> Cost:
        """The cost of one operation on groups of `size`, `stride` apart; nothing for a group of one.

        Raises:
            MissingMeasurementError: the link that the group uses is neither measured nor in the catalog.
        """
        if size <= 1:
            return Cost(0.0, 0.0)
        key = (op, size, stride)
        if key not in self._costs:
            self._costs[key] = self._as_run(self._fitted(*key) or self._from_catalog(*key), *key)
        return self._costs[key]

    def _geometry(self, size: int, stride: int) -> Geometry:
        return geometry(self._cluster.domain, self._cluster.devices, size, stride)  # a rack is a node to a message

    def _fitted(self, op: CollectiveOp, size: int, stride: int) -> Cost | None:
        group = self._geometry(size, stride)
        level = [fit for fit in self._fits if fit.crosses_nodes == group.crosses_nodes]
        if not level:
            return None
        # The same layout, else the one that fewest doublings of group size and stride lie between.
        fit = min(
            [fit for fit in level if fit.op is op] or level,
            key=lambda fit: abs(math.log2(fit.group_size / size)) + abs(math.log2(fit.stride / stride)),
        )
        if group.crosses_nodes and (fit.op, fit.group_size, fit.stride) != (op, size, stride):
            return self._across(op, group, fit)
        return self._within(op, size, stride, fit) or Cost(
            fit.latency_s * ring_steps(op, size), ring_traffic(op, size) / fit.bytes_per_s
        )

    def _within(self, op: CollectiveOp, size: int, stride: int, fit: LinkFit) -> Cost | None:
        """Another layout inside a node than the fitted one: as far from the catalog as the fitted one is.

        None where exactly this one was measured, or the catalog has no rate.
        """
        if (fit.op, fit.group_size, fit.stride) == (op, size, stride) or not self._cluster.intra.bytes_per_s:
            return None
        read, asked = self._from_catalog(fit.op, fit.group_size, fit.stride), self._from_catalog(op, size, stride)
        slower = fit.latency_s * ring_steps(fit.op, fit.group_size) / read.alpha_s
        return Cost(
            asked.alpha_s * slower,
            asked.s_per_byte * ring_traffic(fit.op, fit.group_size) / fit.bytes_per_s / read.s_per_byte,
        )

    def _as_run(self, cost: Cost, op: CollectiveOp, size: int, stride: int) -> Cost:
        """A collective across nodes as the framework runs it, where exactly this one was not measured.

        Gathering and scattering may be flat rings, whose latency is one of every rank.
        """
        group, framework = self._geometry(size, stride), self._framework
        measured = any((fit.op, fit.group_size, fit.stride) == (op, size, stride) for fit in self._fits)
        if measured or not group.crosses_nodes or op is CollectiveOp.SEND_RECV:
            return cost
        cost = Cost(cost.alpha_s, cost.s_per_byte * framework.crossing_penalty)
        if op not in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER):
            return cost
        hops = (group.nodes - 1) * framework.node_step_s + (size - 1) * framework.rank_step_s
        return Cost(hops or cost.alpha_s, cost.s_per_byte * framework.sharded_penalty)

    def _across(self, op: CollectiveOp, group: Geometry, fit: LinkFit) -> Cost:
        """Another crossing layout than the fitted one: what the fit says of the link between nodes, on two levels.

        All latency is taken to be that of the hops between nodes. The rate across is what explains the fit, unless
        the link inside the node does already.
        """
        read = self._geometry(fit.group_size, fit.stride)
        inside = self._inside_s_per_byte()
        v_node, v_cross = _two_level_traffic(fit.op, read)
        s_per_byte = ring_traffic(fit.op, fit.group_size) / fit.bytes_per_s
        across = s_per_byte / v_cross * self._nic_share(read, fit.op) / self._nic_share(group, op)
        if inside is not None and s_per_byte < 1.1 * v_node * inside and self._cluster.inter is not None:
            across = min(across, 1.0 / self._across_rate(group, op))
        v_node, v_cross = _two_level_traffic(op, group)
        return Cost(
            step_latency_s(fit, read) * ring_steps(op, group.nodes),
            max(v_node * (inside or 0.0), v_cross * across),
        )

    def _inside_s_per_byte(self) -> float | None:
        """Seconds a byte of the link inside a node, measured or the catalog's; None if unknown."""
        rates = [fit.bytes_per_s for fit in self._fits if not fit.crosses_nodes and fit.group_size > 1]
        if rates:
            return 1.0 / max(rates)
        link = self._cluster.intra
        return 1.0 / (link.bytes_per_s * ring_of(link).share) if link.bytes_per_s else None

    def _across_rate(self, group: Geometry, op: CollectiveOp) -> float:
        """A rank's assumed rate across nodes, bytes a second."""
        assert self._cluster.inter is not None  # ClusterSpec: several nodes have a link between them
        return _known_rate(self._cluster.inter, self._cluster) * LINK_EFFICIENCY * self._nic_share(group, op)

    def _nic_share(self, group: Geometry, op: CollectiveOp) -> float:
        """The share of a NIC that a rank has which sends across nodes, while all groups do."""
        senders = group.active
        if op is CollectiveOp.SEND_RECV:
            senders = math.ceil(senders / group.local)  # along a chain only a node's last member sends across
        nics = self._cluster.nics_per_node * max(1, self._cluster.domain // self._cluster.gpus_per_node)
        return min(1.0, nics / senders)

    def _from_catalog(self, op: CollectiveOp, size: int, stride: int) -> Cost:
        """Two levels at once, the slower one sets the pace; the NICs of a node are shared by all its ranks.

        T = max(V_node / B_node, V_cross / B_cross): a collective library moves the pieces of a buffer through both
        levels at the same time.
        """
        group = self._geometry(size, stride)
        inside = self._inside(op, math.ceil(group.local)) if group.local > 1 else Cost(0.0, 0.0)
        if not group.crosses_nodes:
            return Cost(inside.alpha_s, ring_traffic(op, size) * inside.s_per_byte)
        assert self._cluster.inter is not None  # ClusterSpec: several nodes have a link between them
        rate = self._across_rate(group, op)
        across_latency = self._cluster.inter.latency_s or INTER_LATENCY_S
        v_node, v_cross = _two_level_traffic(op, group)
        steps = ring_steps(op, group.nodes) * across_latency
        if op is not CollectiveOp.SEND_RECV:
            steps += inside.alpha_s
        return Cost(steps, max(v_node * inside.s_per_byte, v_cross / rate))

    def _inside(self, op: CollectiveOp, size: int) -> Cost:
        """(latency, seconds a byte of traffic) of a group inside a node, from the catalog."""
        link, steps = self._cluster.intra, ring_steps(op, size)
        ring = ring_of(link)
        alpha = link.latency_s * steps if link.latency_s else ring.start_s + ring.step_s * steps
        return Cost(alpha, 1.0 / (_known_rate(link, self._cluster) * ring.share * (1.0 - ring.few / size)))


def step_latency_s(fit: LinkFit, group: Geometry) -> float:
    """A fit's latency a hop between nodes: all of it, over a ring of the nodes."""
    steps = ring_steps(fit.op, group.nodes)
    return fit.latency_s * ring_steps(fit.op, fit.group_size) / max(steps, 1)


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


def _known_rate(link: Link, cluster: ClusterSpec) -> float:
    if link.bytes_per_s is None:
        raise MissingMeasurementError(
            f"the rate of link {link.name!r} of cluster {cluster.name!r} is not known; measure it with "
            "`autotune probe collective`, or give bytes_per_s in the cluster's file"
        )
    return link.bytes_per_s
