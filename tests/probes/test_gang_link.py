"""A gang on a real link of known speed, in two network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gangs import ENDLESS, NAMES, Gang, gang_cluster
from local_ranks import assert_gone
from test_link import LIMIT, LIMIT_BYTES_PER_S, TOLERANCE, command, fastest_busbw, namespaces

from autotune.specs import CollectiveOp, CollectiveReading, CollectiveRequest, FailureKind
from probes.launch import NodeRanks, Placement

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Placement]]:
    """The ends of a link of LIMIT."""
    with namespaces(LIMIT) as placements:
        yield placements


@pytest.fixture(scope="module")
def gang(_rank_environment: None, sides: list[Placement], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two nodes of two ranks each, one on each side."""
    log_root = tmp_path_factory.mktemp("gang-link")
    nodes = [
        NodeRanks(
            log_root=log_root / name,
            interface=side.environment["GLOO_SOCKET_IFNAME"],
            address=side.address,
            command_prefix=side.command_prefix,
        )
        for name, side in zip(NAMES, sides, strict=True)
    ]
    with Gang(gang_cluster(gpus_per_node=2), nodes) as gang:
        yield gang


def read(gang: Gang, stride: int) -> CollectiveReading:
    """Pairs of ranks, `stride` apart, that send to each other."""
    request = CollectiveRequest(
        op=CollectiveOp.SEND_RECV, group_size=2, stride=stride, sizes_bytes=(1 << 20,), iterations=5
    )
    outcome = gang.run(request, warm=bool(gang.processes()))
    assert outcome.failure is None
    (reading,) = outcome.readings
    assert isinstance(reading, CollectiveReading)
    return reading


@pytest.mark.slow
def test_groups_inside_nodes_and_across_the_link(gang: Gang) -> None:
    assert read(gang, stride=1).busbw_bytes_per_s > 2 * LIMIT_BYTES_PER_S
    assert gang.board.endpoint.startswith("10.231.77.1:")
    shared = LIMIT_BYTES_PER_S / 2  # by both pairs
    fastest = fastest_busbw(lambda: read(gang, stride=2), shared)
    assert fastest == pytest.approx(shared, rel=TOLERANCE)


def test_a_link_that_goes_down(gang: Gang, sides: list[Placement]) -> None:
    read(gang, stride=1)
    processes = gang.processes()
    assert len(processes) == 4
    link = (*sides[1].command_prefix, "ip", "link", "set", sides[1].environment["GLOO_SOCKET_IFNAME"])
    across = ENDLESS.model_copy(update={"stride": 2})
    failure = gang.run(across, warm=True, deadline_s=3, on_progress=lambda: command(*link, "down")).failure
    command(*link, "up")
    assert failure is not None
    assert failure.kind in {FailureKind.COMMUNICATION, FailureKind.HANG}
    assert_gone(processes, 0)
    assert gang.processes() == []
