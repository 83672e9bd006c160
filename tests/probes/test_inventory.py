"""What a node registers of itself, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from gangs import gang_cluster

from autotune.errors import InputError, ProberError
from autotune.specs import ClusterSpec
from probes.discover import gpus
from probes.inventory import nics, node_inventory


@pytest.mark.usefixtures("_rank_environment")
def test_a_node_of_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = gang_cluster(gpus_per_node=2)
    before, nics_before = set(psutil.Process().children(recursive=True)), set(nics())
    inventory = node_inventory(cluster, log_root=tmp_path)
    assert (inventory.device, inventory.slots, inventory.reason) == (cluster.device, 2, "")
    assert inventory.cores == len(os.sched_getaffinity(0))
    assert 0 < inventory.memory_bytes <= psutil.virtual_memory().total
    # Tests beside this one may make and remove interfaces.
    assert nics_before & set(nics()) <= set(inventory.nics) <= nics_before | set(nics())
    assert inventory.fingerprint is not None
    assert inventory.fingerprint.hostname == os.uname().nodename
    assert inventory.fingerprint.device_memory_bytes == cluster.device.memory_bytes
    assert set(psutil.Process().children(recursive=True)) <= before
    # The same node under another interface, whose name says nothing about speed.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    again = node_inventory(cluster, log_root=tmp_path, slots=1)
    assert again.fingerprint is not None
    assert again.fingerprint.environment_key == inventory.fingerprint.environment_key
    assert (again.slots, again.reason) == (1, "1 of 2 devices found")


@pytest.mark.skipif(bool(gpus()), reason="a node without its GPUs")
def test_a_node_whose_devices_are_not_there(tmp_path: Path) -> None:
    data = gang_cluster().to_data()
    data["device"] |= {"kind": "cuda"}
    inventory = node_inventory(ClusterSpec.from_data(data), log_root=tmp_path)
    assert (inventory.slots, inventory.fingerprint, inventory.reason) == (0, None, "0 of 1 devices found")


def test_what_cannot_be_offered(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="slots: 0 cannot be used"):
        node_inventory(gang_cluster(), log_root=tmp_path, slots=0)
    with pytest.raises(
        InputError, match=r"--slots: 1000000 .* 1000000 ranks share .* device\.memory_bytes\): \d+ at most"
    ):
        node_inventory(gang_cluster(), log_root=tmp_path, slots=10**6)
    large = gang_cluster().to_data()
    large["device"] |= {"memory_bytes": 2**60}
    with pytest.raises(InputError, match=r"^cluster\.device\.memory_bytes: "):
        node_inventory(ClusterSpec.from_data(large), log_root=tmp_path)


def test_logs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProberError, match="no logs can be written"):
        node_inventory(gang_cluster(), log_root=tmp_path / "file")


def test_interfaces(tmp_path: Path) -> None:
    for name, kind, state, speed in [
        ("ib0", "32", "up", "200000"), ("eth0", "1", "up", "-1"),
        ("eth1", "1", "down", "1000"), ("lo", "772", "up", "10"), ("eth2", "1", "up", "-1"),
    ]:  # fmt: skip
        (tmp_path / name).mkdir()
        for file, text in [("type", kind), ("operstate", state), ("speed", speed)]:
            (tmp_path / name / file).write_text(text + "\n")
    (tmp_path / "eth2" / "speed").unlink()  # as a driver that refuses
    assert [nic.name for nic in nics(tmp_path)] == ["eth0", "eth2", "ib0"]
    assert [nic.bytes_per_s for nic in nics(tmp_path)] == [None, None, 25e9]
