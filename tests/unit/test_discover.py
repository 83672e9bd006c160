"""What a machine tells of itself: real discovery of this one, and parsing of what drivers print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.errors import InputError
from autotune.specs import ClusterSpec, DeviceKind
from probes.discover import (
    control_group_limit_bytes,
    cpu_name,
    default_ranks,
    discover,
    gpus,
    parse_query,
    parse_topology,
    parse_torch,
    share_bytes,
)

on_cpu = pytest.mark.skipif(bool(gpus()), reason="describes the CPU of a machine without a GPU")


@on_cpu
def test_a_machine_without_a_gpu_is_ranks_on_its_cpu() -> None:
    cluster = discover()
    assert (cluster.nodes, cluster.inter) == (1, None)
    assert cluster.gpus_per_node == default_ranks(len(os.sched_getaffinity(0)))
    assert (cluster.device.kind, cluster.device.name) == (DeviceKind.CPU, cpu_name())
    assert cluster.device.peak_flops_per_s == {}
    assert cluster.intra.bytes_per_s is None
    assert "not known" in cluster.intra.source
    assert cluster.device.memory_bytes * cluster.devices <= psutil.virtual_memory().total


@on_cpu
def test_the_same_machine_is_the_same_cluster_and_survives_a_file(tmp_path: Path) -> None:
    cluster = discover()
    (tmp_path / "c.yaml").write_text(cluster.to_yaml())
    assert ClusterSpec.from_file(tmp_path / "c.yaml") == cluster
    assert discover().key == cluster.key


@on_cpu
def test_ranks_and_memory_can_be_chosen() -> None:
    cluster = discover(ranks=2, memory_bytes=64 << 20)
    assert (cluster.devices, cluster.device.memory_bytes) == (2, 64 << 20)


@on_cpu
@pytest.mark.parametrize(
    ("ranks", "memory_bytes", "what"),
    [(0, None, "ranks"), (-1, None, "ranks"), (10**9, None, "ranks"), (2, 0, "memory"), (2, 1 << 60, "memory")],
)
def test_what_this_machine_cannot_give_is_one_clear_error(ranks: int, memory_bytes: int | None, what: str) -> None:
    with pytest.raises(InputError) as error:
        discover(ranks, memory_bytes)
    assert error.value.what == what


def test_discovery_loads_no_torch_here() -> None:
    program = "import sys; from probes.discover import discover; discover(); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(("cores", "ranks"), [(1, 4), (2, 4), (4, 4), (7, 4), (8, 8), (64, 8)])
def test_default_ranks_are_four_or_eight(cores: int, ranks: int) -> None:
    assert default_ranks(cores) == ranks


def test_a_share_is_three_quarters_in_grains_of_256_mib() -> None:
    assert share_bytes(32 << 30, 4) == 6 << 30
    assert share_bytes((32 << 30) + 12345, 4) == 6 << 30
    assert share_bytes(512 << 20, 4) == 96 << 20


def test_torchs_devices_are_read() -> None:
    text = 'a warning\n{"rocm": false, "devices": [["NVIDIA H200", 150000000000], ["NVIDIA H200", 150000000000]]}\n'
    found = parse_torch(text)
    assert [(gpu.name, gpu.memory_bytes, gpu.kind) for gpu in found] == [
        ("NVIDIA H200", 150_000_000_000, DeviceKind.CUDA)
    ] * 2
    assert parse_torch('{"rocm": true, "devices": [["AMD Instinct MI300X", 1]]}')[0].kind is DeviceKind.ROCM
    assert parse_torch('{"rocm": false, "devices": []}') == []


def test_nvidia_smis_devices_are_read() -> None:
    found = parse_query("NVIDIA A100-SXM4-80GB, 81920\nNVIDIA A100-SXM4-80GB, 81920\n")
    assert [(gpu.name, gpu.memory_bytes) for gpu in found] == [("NVIDIA A100-SXM4-80GB", 81920 << 20)] * 2
    assert parse_query("No devices were found\n") == []
    assert parse_query("NVIDIA X, [N/A]\n") == []
    assert parse_query("") == []


NVLINK = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-63\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
"""


def test_the_topology_is_read() -> None:
    assert parse_topology(NVLINK, 2) == "NVLink"
    assert parse_topology(NVLINK.replace("NV18", "PHB"), 2) == "PCIe"
    assert parse_topology(NVLINK.replace("NV18", "NODE", 1), 2) == "PCIe"
    assert parse_topology(NVLINK, 4) == "unknown"
    assert parse_topology("", 2) == "unknown"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "700\n", "a/memory.max": "1000\n"}, 700),
        ("0::/\n", {}, None),
        ("5:cpu:/x\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "500\n"}, 500),
        ("5:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "500\n"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_limit_of_the_control_group_counts(
    tmp_path: Path, membership: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert control_group_limit_bytes(tmp_path, tmp_path / "cgroup") == limit
