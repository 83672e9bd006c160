"""How a node comes into the fleet: what it has, compared with what its cluster says, under a session of its own."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import psutil

from autotune.errors import InputError, StoreConflictError
from autotune.settings import FleetTimes
from autotune.specs import ClusterSpec, Device, Fingerprint, Node
from autotune.specs.command import CommandOffer
from autotune.specs.fleet import LOCAL

if TYPE_CHECKING:
    from autotune.ports.fleet import FleetStore

log = logging.getLogger("autotune.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node's worker is told. `interface` has `address`; `slots` None means all devices that are found."""

    name: str
    cluster: ClusterSpec
    address: str
    interface: str
    topology: str = ""
    slots: int | None = None
    lost_after_s: float = FleetTimes().lease_s


class Inventory(Protocol):
    """What was found on this machine; probes.inventory finds it."""

    @property
    def device(self) -> Device:
        """The devices' kind and name."""

    @property
    def slots(self) -> int:
        """How many there are."""

    @property
    def cores(self) -> int:
        """Cores of the host."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the host."""

    @property
    def nics(self) -> Sequence[object]:
        """Network interfaces."""

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The environment of a rank; None without a device."""

    @property
    def reason(self) -> str:
        """Why it cannot do its part in the cluster; empty if it can."""


def place(address: str | None, interface: str | None, peer_url: str) -> tuple[str, str]:
    """The node's address and interface: where one is not given, those by which it reaches the peer (its broker).

    Raises:
        InputError: this machine has no such address or interface, or the peer's name is not known.
    """
    own = _own_addresses()
    if interface is not None and interface not in own:
        raise InputError("--interface", interface, "this machine has " + ", ".join(sorted(own)))
    if address is None:
        address = own[interface][0] if interface is not None else _address_towards(peer_url)
    holders = [name for name, addresses in own.items() if address in addresses]
    if interface is None and not holders and not _is_loopback(address):
        raise InputError(
            "--address",
            address,
            "this machine has " + ", ".join(sorted({each for addresses in own.values() for each in addresses})),
        )
    return address, interface or (holders[0] if holders else "lo")


def check_pool(cluster: ClusterSpec, known: Sequence[ClusterSpec]) -> bool:
    """Whether the pool's cluster is new.

    Raises:
        InputError: a cluster of that name is stored with other hardware, or no fleet's pool may be called so.
    """
    if cluster.name.startswith(LOCAL):
        raise InputError("--cluster", cluster.name, f"the name of a pool does not begin with {LOCAL}")
    for other in known:
        if other.name == cluster.name:
            if _hardware(other) != _hardware(cluster):
                raise InputError(
                    "--cluster",
                    cluster.name,
                    "it is stored with other hardware: give it another name, or replace that (autotune cluster add)",
                )
            return False
    return True


def register(
    store: FleetStore, options: NodeOptions, inventory: Inventory, commands: Sequence[CommandOffer] = ()
) -> Node:
    """Stores the node under a new session, and its cluster if it is the first of its pool.

    A node that has fewer devices than its cluster says is stored all the same: it is shown, and never chosen.
    """
    cluster = options.cluster
    _store_pool(store, cluster)
    _tell_of_older(store, options.name)
    key = store.put_fingerprint(inventory.fingerprint) if inventory.fingerprint is not None else ""
    node = store.register_node(_node(options, inventory, key, store.now(), commands))
    what = f"{node.slots} x {node.device.name} at {node.address}, session {node.session}"
    log.info("node %s: registered in pool %s, %s", node.name, node.pool, what)
    if inventory.reason:
        log.error("node %s: %s, so it will not be used", node.name, inventory.reason)
    return node


def _store_pool(store: FleetStore, cluster: ClusterSpec) -> None:
    """Stores the cluster of a pool that is new, or that has no node yet and was stored by somebody with a key."""
    known = store.clusters()
    if not check_pool(cluster, known):
        if store.nodes(cluster.name):
            return
        stored = next(each for each in known if each.name == cluster.name)
        with suppress(StoreConflictError):
            store.put_cluster(stored, only_own=True)
            return
    store.put_cluster(cluster)
    log.info("pool %s: stored its cluster", cluster.name)


def _tell_of_older(store: FleetStore, name: str) -> None:
    older = next((node for node in store.nodes() if node.name == name), None)
    if older is not None and (age_s := (store.now() - older.heartbeat_at).total_seconds()) < older.lost_after_s:
        log.warning("node %s: a worker of this name was alive %.0f s ago; it is evicted", name, age_s)


def _node(
    options: NodeOptions, inventory: Inventory, fingerprint_key: str, now: datetime, commands: Sequence[CommandOffer]
) -> Node:
    fingerprint = inventory.fingerprint
    return Node(
        name=options.name,
        pool=options.cluster.name,
        address=options.address,
        topology=options.topology,
        device=inventory.device,
        slots=inventory.slots,
        nics=max(1, len(inventory.nics)),
        cores=inventory.cores,
        memory_bytes=inventory.memory_bytes,
        fingerprint_key=fingerprint_key,
        environment_key=fingerprint.environment_key if fingerprint is not None else "",
        session=uuid.uuid4().hex,
        lost_after_s=options.lost_after_s,
        commands=tuple(commands),
        registered_at=now,
        heartbeat_at=now,
    )


def _hardware(cluster: ClusterSpec) -> str:
    return cluster.digest(without=frozenset({"name", "nodes", "inter"}))


def _own_addresses() -> dict[str, list[str]]:
    found = {
        name: [each.address for each in addresses if each.family in {socket.AF_INET, socket.AF_INET6}]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _address_towards(url: str) -> str:
    """The address of this machine that packets to a URL's host leave from. Sends nothing."""
    host = urlsplit(url).hostname or "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError("--address", None, f"give one: {host} is not known here ({error})") from None
