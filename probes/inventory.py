"""What a node has: the devices that were found, its network interfaces and its environment. Loads no torch itself."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.errors import InputError
from autotune.specs import ClusterSpec, Device, DeviceKind, Fingerprint
from probes.discover import control_group_limit_bytes, gpus
from probes.launch import LocalProber, Placement
from probes.launch.gang import INTERFACE_VARIABLES
from probes.launch.placement import rank_environment

_LOOPBACK = 772  # ARPHRD_LOOPBACK, linux/if_arp.h
_OMP = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface. `bytes_per_s` is what the driver reports for its link; None where it reports nothing."""

    name: str
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInventory:
    """What a node registers of itself.

    `slots` are the devices found. `device` is as found (without peaks), or the cluster's where devices are CPU ranks.
    `memory_bytes` is the host's. `reason` says why the node cannot do its part in the cluster; empty if it can.
    """

    device: Device
    slots: int
    cores: int
    memory_bytes: int
    nics: tuple[Nic, ...]
    fingerprint: Fingerprint | None
    reason: str = ""


def node_inventory(cluster: ClusterSpec, *, log_root: Path, slots: int | None = None) -> NodeInventory:
    """Finds what this node has for a cluster that it is one node of.

    The fingerprint is that of one rank, started for it and ended again; None without a device. It is read on the
    loopback interface and with the threads that each of `slots` ranks gets, so that equal nodes agree in it whatever
    their interfaces are called.

    Args:
        cluster: tells the kind of the devices, how many a node should have, and the memory of a CPU rank.
        log_root: where that rank writes.
        slots: how many devices to offer at most; None means all GPUs, or as many CPU ranks as the cluster's nodes have.

    Raises:
        InputError: CPU ranks that do not fit into this machine's memory, or no slots.
        ProberError: no rank can be started.
    """
    if slots is not None and slots < 1:
        raise InputError("slots", slots, "give a whole number of at least 1")
    memory_bytes = min(psutil.virtual_memory().total, control_group_limit_bytes() or sys.maxsize)
    on_cpu = cluster.device.kind is DeviceKind.CPU
    device, found = _cpu_ranks(cluster, slots, memory_bytes) if on_cpu else _gpus(cluster, slots)
    reason = "" if found >= cluster.gpus_per_node else f"{found} of {cluster.gpus_per_node} devices found"
    return NodeInventory(
        device=device,
        slots=found,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        nics=nics(),
        fingerprint=_fingerprint(cluster, device, found, log_root) if found else None,
        reason=reason,
    )


def nics(root: Path = Path("/sys/class/net")) -> tuple[Nic, ...]:
    """The network interfaces that are up, by name, without the loopback."""
    return tuple(
        Nic(name=path.name, bytes_per_s=_link_bytes_per_s(path))
        for path in sorted(root.iterdir())
        if _number(path / "type") != _LOOPBACK and _text(path / "operstate") == "up"
    )


def _cpu_ranks(cluster: ClusterSpec, slots: int | None, memory_bytes: int) -> tuple[Device, int]:
    ranks = slots or cluster.gpus_per_node
    if ranks * cluster.device.memory_bytes > memory_bytes:
        each_bytes = cluster.device.memory_bytes
        share = f"{ranks} ranks share {memory_bytes} bytes on this node"
        if slots is None:
            raise InputError("cluster.device.memory_bytes", each_bytes, share)
        most = f"each rank takes {each_bytes} bytes (the cluster's device.memory_bytes)"
        raise InputError("--slots", slots, f"{share}, and {most}: {memory_bytes // each_bytes} at most")
    return cluster.device, ranks


def _gpus(cluster: ClusterSpec, slots: int | None) -> tuple[Device, int]:
    found = [gpu for gpu in gpus() if gpu.kind is cluster.device.kind]
    if not found:
        return cluster.device, 0
    first = found[0]
    device = Device(name=first.name, kind=first.kind, memory_bytes=first.memory_bytes, source=first.told_by)
    equal = sum((gpu.name, gpu.memory_bytes) == (first.name, first.memory_bytes) for gpu in found)
    return device, min(equal, slots or equal)


def _fingerprint(cluster: ClusterSpec, device: Device, slots: int, log_root: Path) -> Fingerprint:
    environment = {name: "lo" for name in INTERFACE_VARIABLES if name in os.environ}
    if device.kind is DeviceKind.CPU:
        environment[_OMP] = rank_environment(device.kind, slots, Placement())[_OMP]
    placement = Placement(environment=environment)
    with LocalProber(cluster, log_dir=log_root, ranks=1, placements=[placement]) as prober:
        return prober.fingerprint()


def _link_bytes_per_s(interface: Path) -> float | None:
    megabits_per_s = _number(interface / "speed")
    return megabits_per_s * 1e6 / 8 if megabits_per_s is not None and megabits_per_s > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # some drivers refuse to tell, and say so by an error
        return ""
