"""Health probes and canaries: what is asked, when, and what is slow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from fleet_world import DEVICE, pool_cluster

from autotune.fleet.health import back_off_s, following, health_job, health_requests, slowness
from autotune.fleet.sweeping import is_canary_due
from autotune.settings import FleetTimes
from autotune.specs import CollectiveRequest, LayerRequest, Node

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def node(age_s: float = 0.0) -> Node:
    return Node(
        name="a", pool="box", address="", device=DEVICE, slots=3, session="s", registered_at=NOW,
        heartbeat_at=NOW - timedelta(seconds=age_s),
    )  # fmt: skip


@pytest.mark.parametrize(("devices", "kinds"), [(1, ["layer"]), (3, ["collective", "layer"])])
def test_a_check_is_a_collective_where_there_is_one_and_a_layer(devices: int, kinds: list[str]) -> None:
    cluster = pool_cluster(nodes=4, gpus_per_node=devices)
    requests = health_requests(cluster)
    assert [request.kind for request in requests] == kinds
    first = health_job(node(), cluster, requests[0], NOW)
    assert (first.only_node, first.cluster.nodes, first.tuning_id) == ("a", 1, None)
    chain = [first]
    while (request := following(chain[-1])) is not None:
        chain.append(health_job(node(), cluster, request, NOW))
    assert [job.request for job in chain] == list(requests)


def test_sizes_divide_among_the_devices_of_any_node() -> None:
    for devices in range(2, 20):
        collective, layer = health_requests(pool_cluster(gpus_per_node=devices))
        assert isinstance(collective, CollectiveRequest)
        assert isinstance(layer, LayerRequest)
        assert len(collective.sizes_bytes) == 2
        assert all(size % (4 * devices) == 0 for size in collective.sizes_bytes)


def test_the_probe_is_the_one_that_nodes_were_measured_with_before() -> None:
    """Readings are found by these keys: with others a node would have no past and its pool nothing to compare."""
    collective, layer = health_requests(pool_cluster(gpus_per_node=3))
    assert isinstance(collective, CollectiveRequest)
    assert isinstance(layer, LayerRequest)
    assert collective.sizes_bytes == (65_532, 4_194_300)
    assert (layer.model.key, layer.workload.key, layer.micro_batch) == ("82aa7dcb6358ae1e", "d2344eed2f688976", 4)


def test_slow_is_below_seven_tenths_of_the_median_of_the_others() -> None:
    others = [{"layer": 90.0}, {"layer": 100.0}, {"layer": 500.0, "all_reduce": 1.0}]
    assert slowness({"layer": 70.0}, others) == ""
    assert slowness({"layer": 69.0}, others) == "layer at 0.69 of the pool's median (3 other nodes)"
    assert slowness({"layer": 1.0}, []) == ""  # nothing to compare with is no reproach
    assert slowness({"layer": 99.0, "all_reduce": 0.5}, others).startswith("all_reduce at 0.50")


def test_each_failed_check_doubles_the_time_to_the_next() -> None:
    assert [back_off_s(failures) for failures in (1, 2, 3, 4, 5)] == [0.0, 0.0, 30.0, 60.0, 120.0]
    assert back_off_s(10_000) == 900.0


@pytest.mark.parametrize(
    ("age_s", "due"), [(0, False), (30, False), (31, True), (60, True), (61, True), (66, False), (91, True)]
)
def test_a_silent_node_is_asked_at_every_sweep_and_a_lost_one_now_and_then(age_s: float, *, due: bool) -> None:
    assert is_canary_due(node(age_s), NOW, FleetTimes().sweep_every_s) is due
