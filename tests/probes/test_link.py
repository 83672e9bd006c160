"""Probes across a real link of known speed: two network namespaces joined by a veth pair with a token bucket."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from local_ranks import AMPLE_S, cpu_cluster

from autotune.specs import (
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    ModelSpec,
    Plan,
    StepReading,
    StepRequest,
    Workload,
)
from probes.launch import LocalProber, Placement

LIMIT = "100mbit"
LIMIT_BYTES_PER_S = 100e6 / 8
TOLERANCE = 0.15
TRIES = 4
"""Whatever else a machine does makes a link look slower, never faster: the fastest of so many readings counts."""

pytestmark = pytest.mark.netns


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str | None:
    """Why namespaces cannot be used here, or None."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (iproute2)" if missing else None


@contextmanager
def namespaces(rate: str | None) -> Iterator[list[Placement]]:
    """Two namespaces joined by a link of that rate each way (tc's words, None for no limit): a placement in each."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    names = [f"autotune-{uuid.uuid4().hex[:8]}-{side}" for side in "ab"]
    devices = ["probe-a", "probe-b"]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        peer = ("type", "veth", "peer", "name", devices[1], "netns", names[1])
        command("ip", "link", "add", devices[0], "netns", names[0], *peer)
        for number, (name, device) in enumerate(zip(names, devices, strict=True), start=1):
            inside = ("ip", "netns", "exec", name)
            command(*inside, "ip", "address", "add", f"10.231.77.{number}/24", "dev", device)
            command(*inside, "ip", "link", "set", device, "up")
            command(*inside, "ip", "link", "set", "lo", "up")
            if rate is not None:
                limit = ("rate", rate, "burst", "128kb", "latency", "20ms")
                command(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield [
            Placement(
                command_prefix=("ip", "netns", "exec", name),
                environment={"GLOO_SOCKET_IFNAME": device},
                address=f"10.231.77.{number}",
            )
            for number, (name, device) in enumerate(zip(names, devices, strict=True), start=1)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def limited(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProber]:
    """One rank on each side of a link of LIMIT."""
    with (
        namespaces(LIMIT) as placements,
        LocalProber(cpu_cluster(2), log_dir=tmp_path_factory.mktemp("link"), placements=placements) as prober,
    ):
        yield prober


def read(prober: LocalProber, op: CollectiveOp, group_size: int, stride: int) -> CollectiveReading:
    size = (1 << 20,)
    request = CollectiveRequest(op=op, group_size=group_size, stride=stride, sizes_bytes=size, iterations=5)
    outcome = prober.run(request, deadline_s=AMPLE_S)
    assert outcome.failure is None
    reading = outcome.readings[0]
    assert isinstance(reading, CollectiveReading)
    return reading


def fastest_busbw(read_once: Callable[[], CollectiveReading], expected: float) -> float:
    """Of several readings; none is taken after one that is fast enough."""
    fastest = 0.0
    for _ in range(TRIES):
        fastest = max(fastest, read_once().busbw_bytes_per_s)
        if fastest >= expected * (1 - TOLERANCE):
            break
    return fastest


@pytest.mark.parametrize("op", [CollectiveOp.SEND_RECV, CollectiveOp.ALL_REDUCE])
def test_a_limited_link_is_read_as_what_it_is(limited: LocalProber, op: CollectiveOp) -> None:
    fastest = fastest_busbw(lambda: read(limited, op, 2, 1), LIMIT_BYTES_PER_S)
    assert fastest == pytest.approx(LIMIT_BYTES_PER_S, rel=TOLERANCE)


@pytest.mark.parametrize("op", [CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_TO_ALL])
def test_no_operation_reads_more_than_the_link_gives(limited: LocalProber, op: CollectiveOp) -> None:
    # gloo does not fill both directions at once here (it reduce-scatters by an all-reduce, for one).
    assert read(limited, op, 2, 1).busbw_bytes_per_s < LIMIT_BYTES_PER_S * (1 + TOLERANCE)


@pytest.mark.slow  # test_gang_link reads such groups too, with ranks of two nodes
@pytest.mark.usefixtures("_rank_environment")
def test_groups_that_share_a_link_share_its_speed(tmp_path: Path) -> None:
    with (
        namespaces(LIMIT) as (left, right),
        LocalProber(cpu_cluster(4), log_dir=tmp_path, placements=[left, left, right, right]) as prober,
    ):
        inside = read(prober, CollectiveOp.SEND_RECV, 2, 1)
        assert inside.busbw_bytes_per_s > 2 * LIMIT_BYTES_PER_S
        shared = LIMIT_BYTES_PER_S / 2
        across = fastest_busbw(lambda: read(prober, CollectiveOp.SEND_RECV, 2, 2), shared)
        assert across == pytest.approx(shared, rel=TOLERANCE)


def train(prober: LocalProber) -> StepReading:
    """A data-parallel step of a model with 4.2 MB of fp32 gradients."""
    shape = {"layers": 2, "hidden": 128, "heads": 4, "ffn": 512, "gated": True, "vocab": 2048, "tied": False}
    model = ModelSpec.from_data({"name": "small", **shape, "norm": "rmsnorm"})
    workload = Workload.from_data({"seq_len": 32, "global_batch": 2, "dtype": "fp32"})
    request = StepRequest(model=model, workload=workload, plan=Plan(dp=2), warmup_steps=2, min_steps=1, max_steps=2)
    outcome = prober.run(request, deadline_s=AMPLE_S)
    assert outcome.failure is None
    reading = outcome.readings[0]
    assert isinstance(reading, StepReading)
    return reading


def least_t_comm_s(reading: StepReading) -> float:
    """T_comm of the rank that waited least for the other one."""
    times_s = [rank.t_comm_s for rank in reading.ranks if rank.t_comm_s is not None]
    assert len(times_s) == 2
    return min(times_s)


def test_communication_of_a_step_grows_with_the_link(limited: LocalProber, pair: LocalProber) -> None:
    layer = 4 * 128 * 128 + 3 * 128 * 512 + 2 * 128
    gradient_bytes = 4 * (2 * 2048 * 128 + 2 * layer + 128)
    # A ring all-reduce of two ranks moves the whole buffer once each way.
    expected_s = gradient_bytes / LIMIT_BYTES_PER_S
    inside, across = train(pair), train(limited)
    least_s = least_t_comm_s(across)
    for _ in range(TRIES - 1):
        if least_s <= expected_s * (1 + TOLERANCE):
            break
        across = train(limited)
        least_s = min(least_s, least_t_comm_s(across))
    assert least_s == pytest.approx(expected_s, rel=TOLERANCE)
    assert least_s > least_t_comm_s(inside)
    assert across.losses == pytest.approx(inside.losses, rel=1e-4)
