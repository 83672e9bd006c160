"""Group geometry and collective times on one and two levels, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.cost.framework import TORCH
from autotune.cost.network import UNREAD, Network, distinct_share, geometry, ring_of, ring_steps, ring_traffic
from autotune.errors import InputError, MissingMeasurementError
from autotune.specs import ClusterSpec, CollectiveOp, Link, LinkFit, Profile

# What groups reach of the link inside a node, bytes a second, nobody having read it: 0.8 * (1 - 0.45 / size) * 300e9,
# so 186e9 of two ranks, 213e9 of four, 226.5e9 of eight. Across nodes 0.8 * 25e9 = 20e9 a NIC.
INTRA, INTER = 300e9, 25e9


def cluster(nodes: int, gpus_per_node: int, nics: int = 1, *, known: bool = True, intra: float = INTRA) -> ClusterSpec:
    rate = {"bytes_per_s": intra} if known else {}
    return ClusterSpec.from_data(
        {
            "name": "c", "nodes": nodes, "gpus_per_node": gpus_per_node, "nics_per_node": nics,
            "device": {"name": "d", "kind": "cuda", "memory_bytes": 2**30},
            "intra": {"name": "inside", **rate}, "inter": {"name": "across", "bytes_per_s": INTER},
        }
    )  # fmt: skip


def fit(op: CollectiveOp, size: int, stride: int, rate: float, *, crosses: bool = False) -> LinkFit:
    return LinkFit(
        op=op, group_size=size, stride=stride, crosses_nodes=crosses, latency_s=1e-5, bytes_per_s=rate,
        relative_error=0.0, readings=3,
    )  # fmt: skip


def profile(*links: LinkFit) -> Profile:
    return Profile(cluster_key="c", fingerprint_key="f", links=links)


@pytest.mark.parametrize("gpus_per_node", [2, 4, 6, 8])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_geometry_is_that_of_the_widest_of_all_groups(gpus_per_node: int, size: int, stride: int) -> None:
    devices = gpus_per_node * size * stride
    groups = [
        {(block * size * stride + offset + i * stride) // gpus_per_node for i in range(size)}
        for block in range(devices // (size * stride))
        for offset in range(stride)
    ]
    found = geometry(gpus_per_node, devices, size, stride)
    assert found.nodes == max(len(nodes) for nodes in groups)
    assert found.nodes * found.local == size


@pytest.mark.parametrize(
    ("op", "steps", "traffic", "alpha_us", "rate"),
    [
        (CollectiveOp.ALL_REDUCE, 6, 1.5, 29.0, 213e9),  # 20 us to start it and 1.5 us a step
        (CollectiveOp.ALL_GATHER, 3, 0.75, 24.5, 213e9),
        (CollectiveOp.REDUCE_SCATTER, 3, 0.75, 24.5, 213e9),
        (CollectiveOp.ALL_TO_ALL, 3, 0.75, 24.5, 213e9),
        (CollectiveOp.SEND_RECV, 1, 1.0, 21.5, 186e9),  # between two of the four
    ],
)
def test_ring_inside_a_node(op: CollectiveOp, steps: int, traffic: float, alpha_us: float, rate: float) -> None:
    assert (ring_steps(op, 4), ring_traffic(op, 4)) == (steps, traffic)
    cost = Network(cluster(1, 4)).cost(op, 4, 1)
    assert cost.alpha_s == pytest.approx(alpha_us * 1e-6)
    assert cost.s_per_byte == pytest.approx(traffic / rate)


# nccl-tests on one node, microseconds: A100 (eight 400 W SXM), H100 SXM; all_reduce of 16 MiB and 512 MiB.
READ = [
    ("NVLink 3", 300e9, 2, 2**24, 128.2), ("NVLink 3", 300e9, 4, 2**24, 183.5), ("NVLink 3", 300e9, 8, 2**24, 216.5),
    ("NVLink 3", 300e9, 2, 2**29, 2781.1), ("NVLink 3", 300e9, 4, 2**29, 3716.3), ("NVLink 3", 300e9, 8, 2**29, 4225.9),
    ("NVLink 4", 450e9, 2, 2**24, 81.1), ("NVLink 4", 450e9, 4, 2**24, 99.0), ("NVLink 4", 450e9, 8, 2**24, 121.9),
    ("NVLink 4", 450e9, 2, 2**29, 1673.9), ("NVLink 4", 450e9, 4, 2**29, 2299.7),
]  # fmt: skip


@pytest.mark.parametrize(("link", "rate", "ranks", "size_bytes", "time_us"), READ)
def test_links_that_were_read_cost_what_was_read(
    link: str, rate: float, ranks: int, size_bytes: int, time_us: float
) -> None:
    """Published readings, from aiconfigurator's tables. Within a third: the constants are of all operations."""
    known = cluster(1, 8).model_copy(update={"intra": Link(name=link, bytes_per_s=rate)})
    cost = Network(known).cost(CollectiveOp.ALL_REDUCE, ranks, 1)
    assert cost.alpha_s + size_bytes * cost.s_per_byte == pytest.approx(time_us * 1e-6, rel=0.33)
    assert ring_of(known.intra) is not UNREAD


def test_a_group_of_one_costs_nothing() -> None:
    assert Network(cluster(1, 4)).cost(CollectiveOp.ALL_REDUCE, 1, 1) == (0.0, 0.0)


@pytest.mark.parametrize(("nics", "rate"), [(1, 2.5e9), (4, 10e9), (8, 20e9), (16, 20e9)])
def test_ranks_of_a_node_share_its_nics(nics: int, rate: float) -> None:
    """One member a node: all eight ranks of a node are in rings of their own that cross at once, 12 us a hop."""
    cost = Network(cluster(4, 8, nics)).cost(CollectiveOp.ALL_REDUCE, 4, 8)
    assert cost.alpha_s == pytest.approx(72e-6)
    assert cost.s_per_byte == pytest.approx(1.5 / rate)


@pytest.mark.parametrize(
    ("nodes", "nics", "s_per_byte"),
    [(4, 2, 0.1875 / 5e9), (4, 8, 0.1875 / 20e9), (2, 8, 1.75 / 226.5e9)],
)
def test_the_slower_of_two_levels_sets_the_pace(nodes: int, nics: int, s_per_byte: float) -> None:
    """All 8 ranks of each node: 2·7/8·S inside at 226.5e9, while each rank rings an eighth of S over the nodes: of four
    2·3/4/8 = 0.1875, at 20e9 * nics / 8; of two only 2·1/2/8 = 0.125, and then the link inside is the slower one."""
    cost = Network(cluster(nodes, 8, nics)).cost(CollectiveOp.ALL_REDUCE, 8 * nodes, 1)
    assert cost.s_per_byte == pytest.approx(s_per_byte)
    assert cost.alpha_s == pytest.approx(2 * (nodes - 1) * 12e-6 + 20e-6 + 14 * 1.5e-6)


@pytest.mark.parametrize(("intra", "s_per_byte"), [(INTRA, 0.5 / 20e9), (10e9, 0.375 / 7.1e9)])
def test_all_to_all_sends_inside_what_is_there_and_across_what_is_elsewhere(intra: float, s_per_byte: float) -> None:
    """Of 8 ranks on two nodes three of the others are on the same node, four elsewhere. A link of 10e9 inside a node
    gives four ranks 10e9 * 0.8 * (1 - 0.45 / 4) = 7.1e9."""
    cost = Network(cluster(2, 4, nics=4, intra=intra)).cost(CollectiveOp.ALL_TO_ALL, 8, 1)
    assert cost.s_per_byte == pytest.approx(s_per_byte)


@pytest.mark.parametrize(("most", "s_per_byte"), [(0, 0.5 / 20e9), (4, 0.25 / 20e9), (1, 0.0625 / 20e9)])
def test_what_is_sent_to_few_nodes_is_handed_on_inside_them(most: int, s_per_byte: float) -> None:
    """Half of eight copies cross at 20e9; to four nodes at most it is half of that, to one an eighth, but seven eighths
    go over the link inside, of which large groups reach 0.8 * 300e9. Inside one node nothing is saved."""
    network = Network(cluster(2, 4, nics=4))
    sizes, strides = np.array([8.0, 4.0]), np.array([1.0, 1.0])
    found = network.dispatched_s_per_byte(sizes, strides, 8, most)
    assert found == pytest.approx([max(s_per_byte, 0.875 / 240e9), 0.75 / 213e9])


def test_a_token_crosses_once_to_each_node_and_rank() -> None:
    """Eight copies on two nodes reach 2 * (1 - 2^-8) of them, on four ranks 4 * (1 - 0.75^8)."""
    assert distinct_share(2, 8) == pytest.approx(1.9921875 / 8)
    assert distinct_share(1, 8) == 0.125
    once = Network(cluster(2, 4, nics=4), framework=replace(TORCH, dispatches_once=True))
    sizes, strides = np.array([8.0, 4.0]), np.array([1.0, 1.0])
    crossing, inside = once.dispatched_s_per_byte(sizes, strides, 8, 0)
    assert crossing == pytest.approx(0.5 / 20e9 * distinct_share(2, 8))
    assert inside == pytest.approx(0.75 / 213e9 * distinct_share(4, 8))


def test_a_fitted_layout_is_used_as_it_is() -> None:
    network = Network(
        cluster(1, 8), profile(fit(CollectiveOp.ALL_REDUCE, 4, 2, 1e9), fit(CollectiveOp.ALL_REDUCE, 8, 1, 9e9))
    )
    assert network.cost(CollectiveOp.ALL_REDUCE, 4, 2) == pytest.approx((6e-5, 1.5 / 1e9))


def test_the_nearest_layout_of_the_same_level_stands_in() -> None:
    """Without catalog figures a layout is taken to be as its nearest neighbour that was read."""
    fits = (
        fit(CollectiveOp.ALL_REDUCE, 2, 1, 1e9),
        fit(CollectiveOp.ALL_REDUCE, 4, 1, 2e9),
        fit(CollectiveOp.ALL_REDUCE, 2, 8, 3e9, crosses=True),
        fit(CollectiveOp.ALL_GATHER, 8, 1, 4e9),
    )
    network = Network(cluster(2, 8, known=False), profile(*fits))
    assert network.cost(CollectiveOp.ALL_REDUCE, 8, 1).s_per_byte == pytest.approx(2 * 7 / 8 / 2e9)
    assert network.cost(CollectiveOp.REDUCE_SCATTER, 8, 1).s_per_byte == pytest.approx(7 / 8 / 4e9)


def test_a_layout_moves_from_the_catalog_as_its_neighbour_did() -> None:
    """Read at 8 ranks at half of the catalog's speed: then 2 ranks have twice the catalog's time as well."""
    plain = Network(cluster(1, 8))
    alpha, beta = plain.cost(CollectiveOp.ALL_REDUCE, 8, 1)
    read = fit(CollectiveOp.ALL_REDUCE, 8, 1, 2 * 7 / 8 / (2 * beta)).model_copy(update={"latency_s": 2 * alpha / 14})
    found, before = Network(cluster(1, 8), profile(read)), plain.cost(CollectiveOp.ALL_GATHER, 2, 1)
    assert found.cost(CollectiveOp.ALL_REDUCE, 8, 1) == pytest.approx((2 * alpha, 2 * beta))
    assert found.cost(CollectiveOp.ALL_GATHER, 2, 1) == pytest.approx((2 * before.alpha_s, 2 * before.s_per_byte))


def test_a_level_that_was_not_measured_stays_the_catalogs() -> None:
    inside_only = profile(fit(CollectiveOp.ALL_REDUCE, 8, 1, 1e9))
    network, plain = Network(cluster(2, 8), inside_only), Network(cluster(2, 8))
    assert network.cost(CollectiveOp.ALL_REDUCE, 2, 8) == plain.cost(CollectiveOp.ALL_REDUCE, 2, 8)


def test_an_unknown_link_is_an_error_that_says_how_to_measure_it() -> None:
    network = Network(cluster(1, 8, known=False))
    with pytest.raises(MissingMeasurementError, match=r"'inside'.*autotune probe collective"):
        network.cost(CollectiveOp.ALL_REDUCE, 8, 1)


def test_columns_are_the_costs_of_each_group() -> None:
    network = Network(cluster(4, 8, nics=2))
    sizes, strides = np.array([1.0, 8.0, 4.0, 8.0, 32.0]), np.array([1.0, 1.0, 8.0, 1.0, 1.0])
    alpha, beta = network.columns(CollectiveOp.REDUCE_SCATTER, sizes, strides)
    for i in range(len(sizes)):
        assert (alpha[i], beta[i]) == network.cost(CollectiveOp.REDUCE_SCATTER, int(sizes[i]), int(strides[i]))


def test_first_and_last_stage_are_one_pair_within_the_cluster() -> None:
    """A tied embedding's pair on 8 ranks in 4 stages: ranks 0 and 6, 1 and 7; no rank beyond the last one counts."""
    assert not geometry(8, 8, 2, 6).crosses_nodes
    assert geometry(4, 8, 2, 6).crosses_nodes


def test_another_crossing_layout_shares_the_node_rate_that_was_read() -> None:
    """Read: 8 rings of 2 ranks over 2 nodes, 3 GB/s each, so 24 GB/s a node. One ring of all 16 crosses with all of it:
    2·(1/2)/8 of the buffer a rank, at 3 GB/s; its latency is that of the hops between nodes."""
    read = fit(CollectiveOp.ALL_REDUCE, 2, 8, 3e9, crosses=True)
    network = Network(cluster(2, 8), profile(read))
    cost = network.cost(CollectiveOp.ALL_REDUCE, 16, 1)
    assert cost.s_per_byte == pytest.approx(0.125 / 3e9)
    assert cost.alpha_s == pytest.approx(2 * 1e-5)


def test_of_another_crossing_layout_the_link_inside_may_be_the_slower_one() -> None:
    """The same reading, but a bus of 10e9 inside nodes, of which large groups reach 8e9: 2·7/8 of the buffer there."""
    read = fit(CollectiveOp.ALL_REDUCE, 2, 8, 3e9, crosses=True)
    cost = Network(cluster(2, 8, intra=10e9), profile(read)).cost(CollectiveOp.ALL_REDUCE, 16, 1)
    assert cost.s_per_byte == pytest.approx(1.75 / 8e9)


@pytest.mark.parametrize(
    ("size", "stride", "active"), [(2, 4, 4), (4, 2, 4), (8, 1, 4), (2, 2, 4), (2, 6, 2), (2, 7, 1)]
)
def test_the_ranks_of_a_node_that_take_part_are_counted(size: int, stride: int, active: int) -> None:
    assert geometry(4, 8, size, stride).active == active


@pytest.mark.parametrize(("nics", "faster"), [(1, 2.0), (2, 2.0), (3, 4 / 3), (4, 1.0)])
def test_fewer_senders_share_the_nics_that_were_read(nics: int, faster: float) -> None:
    """Read: 4 ranks a node send across at once. In a pipeline of two stages a node 2 do, as the first and the last
    stage's pair of a tied embedding do."""
    send = fit(CollectiveOp.SEND_RECV, 2, 4, 1e9, crosses=True)
    reduce = fit(CollectiveOp.ALL_REDUCE, 2, 4, 1e9, crosses=True)
    network = Network(cluster(2, 4, nics), profile(send, reduce))
    assert network.cost(CollectiveOp.SEND_RECV, 2, 4).s_per_byte == pytest.approx(1e-9)
    assert network.cost(CollectiveOp.SEND_RECV, 4, 2).s_per_byte == pytest.approx(1e-9 / faster)
    assert network.cost(CollectiveOp.ALL_REDUCE, 2, 6).s_per_byte == pytest.approx(1e-9 / faster)


def test_steps_of_a_chain_that_cross_nodes() -> None:
    network = Network(cluster(2, 4))
    sizes, strides = np.array([2.0, 2.0, 4.0, 8.0, 1.0]), np.array([4.0, 2.0, 2.0, 1.0, 8.0])
    assert network.crossings(sizes, strides).tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_long_steps_between_nodes_delay_the_host() -> None:
    slow = fit(CollectiveOp.ALL_REDUCE, 2, 8, 3e9, crosses=True).model_copy(update={"latency_s": 0.3e-3})
    """Where that was seen: at 1.2 host seconds for each that the longest step takes beyond the usual 0.1 ms."""
    quick = fit(CollectiveOp.ALL_GATHER, 2, 8, 3e9, crosses=True).model_copy(update={"latency_s": 0.2e-3})
    inside = fit(CollectiveOp.ALL_REDUCE, 8, 1, 3e9).model_copy(update={"latency_s": 9.0})
    seen, read = replace(TORCH, slow_step_host=1.2), profile(quick, slow, inside)
    assert Network(cluster(2, 8), read, seen).host_delay_s == pytest.approx(0.24e-3)
    assert Network(cluster(2, 8), read).host_delay_s == 0.0
    assert Network(cluster(2, 8), framework=seen).host_delay_s == 0.0


def test_the_link_of_a_rack_carries_what_stays_in_it() -> None:
    """Hosts of 4 in a rack of 64 cost what nodes of 64 do; without the rack they are 16 nodes on their NICs."""
    hosts, rack = cluster_from_shorthand("gb200:32x4"), cluster_from_shorthand("gb200:2x64")
    apart = hosts.model_copy(update={"gpus_per_domain": None})
    for group in (
        (CollectiveOp.ALL_TO_ALL, 64, 1),
        (CollectiveOp.ALL_REDUCE, 2, 64),
        (CollectiveOp.ALL_REDUCE, 128, 1),
    ):
        assert Network(hosts).cost(*group) == Network(rack).cost(*group)
    inside = CollectiveOp.ALL_TO_ALL, 64, 1
    assert Network(apart).cost(*inside).s_per_byte > 10 * Network(hosts).cost(*inside).s_per_byte


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gpus_per_domain": 6}, "multiple of gpus_per_node"),
        ({"nodes_per_pod": 2}, "come together"),
        ({"spine": {"name": "leaf-spine", "bytes_per_s": 1e10}}, "come together"),
        ({"rails": True, "nics_per_node": 1}, "rails need several NICs"),
    ],
)
def test_levels_of_a_network_that_do_not_go_together_are_refused(changes: dict[str, object], complaint: str) -> None:
    data = cluster_from_shorthand("gb200:32x4").to_data()
    with pytest.raises(InputError, match=complaint):
        ClusterSpec.from_data(data | changes)


def test_clusters_of_before_these_levels_were_known_keep_their_key() -> None:
    cluster = cluster_from_shorthand("h100-80gb-sxm:4x8")
    later = frozenset({"node_cores", "gpus_per_domain", "nodes_per_pod", "spine", "rails"})
    assert cluster.key == cluster.digest(without=frozenset({"name"}) | later)
    assert ClusterSpec.from_data(cluster.to_data() | {"rails": True}).key != cluster.key


def test_a_group_wider_than_the_cluster_has_a_cost() -> None:
    """An imported run may be laid out in a way that cannot be here; its estimate must not fail."""
    assert geometry(8, 8, 8, 2).nodes == 2
