"""The network of a box: a bridge in a namespace of its own (the hub), and one namespace a node on a limited link.

Everything is named after the box's number, so a box can be found and removed after a crash of who made it. The hub has
its own namespace because the host's firewall rules (such as Docker's) would otherwise apply to the bridge.
"""

from __future__ import annotations

import ipaddress
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from deploy.box.processes import BoxError, command, require_root, send_signal

PREFIX = "atbox"
SUBNETS = "10.231.{number}.0/24"
NUMBERS = range(1, 255)
MAX_NODES = 200
NODE_DEVICE = "eth0"
BRIDGE = "bridge"
_FIRST_NODE, _HOST = 10, 254
# What a token bucket may send at once, and how long a packet may wait for it before it is dropped.
_BURST, _LATENCY = "128kb", "50ms"


@dataclass(frozen=True, slots=True)
class BoxNetwork:
    """The names and addresses of box `number` with `nodes` nodes; the methods change its links."""

    number: int
    nodes: int

    @property
    def hub(self) -> str:
        """The namespace of the bridge, where the servers run."""
        return f"{PREFIX}{self.number}-hub"

    @property
    def names(self) -> list[str]:
        """The nodes' names, in order."""
        return [f"node{i}" for i in range(self.nodes)]

    @property
    def host_device(self) -> str:
        """The device by which this machine itself reaches the box."""
        return f"{PREFIX}{self.number}"

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        """The box's addresses."""
        return ipaddress.IPv4Network(SUBNETS.format(number=self.number))

    @property
    def hub_address(self) -> str:
        """Where servers listen."""
        return str(self.subnet[1])

    def address(self, node: str) -> str:
        """Where a node is reached by the others."""
        return str(self.subnet[_FIRST_NODE + self.names.index(node)])

    def namespace(self, node: str) -> str:
        """The namespace of a node."""
        return f"{PREFIX}{self.number}-{node}"

    def set_rate(self, node: str, rate_mbit: float) -> None:
        """Limits a node's link to that many Mbit/s in each direction."""
        for namespace, device in ((self.hub, node), (self.namespace(node), NODE_DEVICE)):
            limit = ("rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _LATENCY)
            command("tc", "-netns", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def link_down(self, node: str) -> None:
        """Takes a node off the network: nothing arrives and nobody is told, as when a cable is pulled."""
        command("ip", "-netns", self.hub, "link", "set", node, "down")

    def link_up(self, node: str) -> None:
        """Puts it back."""
        command("ip", "-netns", self.hub, "link", "set", node, "up")


def make_network(nodes: int, rate_mbit: float) -> BoxNetwork:
    """Makes the network of a new box under the first free number. Raises BoxError, leaving nothing behind."""
    require_root()
    if not 1 <= nodes <= MAX_NODES:
        raise BoxError(f"nodes: {nodes} given; 1 to {MAX_NODES} are possible")
    network = _take_number(nodes)
    try:
        _make_hub(network)
        for node in network.names:
            _make_node(network, node)
            network.set_rate(node, rate_mbit)
    except BaseException:
        remove_network(network.number)
        raise
    return network


def _take_number(nodes: int) -> BoxNetwork:
    """The name of the hub's namespace is the lock: of two makers only one can create it."""
    routed = _routed()
    taken = set(_namespaces())
    for number in NUMBERS:
        network = BoxNetwork(number, nodes)
        if network.hub in taken or any(network.subnet.overlaps(other) for other in routed):
            continue
        try:
            command("ip", "netns", "add", network.hub)
        except BoxError:
            if network.hub in _namespaces():
                continue  # somebody else was faster
            raise
        return network
    raise BoxError("no address range is free: `python -m deploy.box list` names the boxes that are up")


def _routed() -> list[ipaddress.IPv4Network]:
    routes = json.loads(command("ip", "-json", "-4", "route", "show") or "[]")
    return [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"][:1].isdigit()]


def _make_hub(network: BoxNetwork) -> None:
    hub = ("ip", "-netns", network.hub)
    command(*hub, "link", "set", "lo", "up")
    command(*hub, "link", "add", BRIDGE, "type", "bridge")
    command(*hub, "address", "add", f"{network.hub_address}/{network.subnet.prefixlen}", "dev", BRIDGE)
    command(*hub, "link", "set", BRIDGE, "up")
    peer = ("type", "veth", "peer", "name", "host", "netns", network.hub)
    command("ip", "link", "add", network.host_device, *peer)
    command(*hub, "link", "set", "host", "master", BRIDGE, "up")
    host = f"{network.subnet[_HOST]}/{network.subnet.prefixlen}"
    command("ip", "address", "add", host, "dev", network.host_device)
    command("ip", "link", "set", network.host_device, "up")


def _make_node(network: BoxNetwork, node: str) -> None:
    namespace = network.namespace(node)
    inside = ("ip", "-netns", namespace)
    command("ip", "netns", "add", namespace)
    peer = ("type", "veth", "peer", "name", node, "netns", network.hub)
    command("ip", "link", "add", NODE_DEVICE, "netns", namespace, *peer)
    command(*inside, "link", "set", "lo", "up")
    command(*inside, "address", "add", f"{network.address(node)}/{network.subnet.prefixlen}", "dev", NODE_DEVICE)
    command(*inside, "link", "set", NODE_DEVICE, "up")
    command("ip", "-netns", network.hub, "link", "set", node, "master", BRIDGE, "up")


def remove_network(number: int) -> None:
    """Removes namespaces and links of a box. Processes in them must have ended. Does nothing where there are none."""
    network = BoxNetwork(number, 0)
    if (Path("/sys/class/net") / network.host_device).exists():
        command("ip", "link", "delete", network.host_device)
    # The hub last: its name is what keeps the number.
    for namespace in sorted(namespaces_of(number), key=lambda name: name == network.hub):
        command("ip", "netns", "delete", namespace)


def numbers() -> list[int]:
    """The boxes that exist, whole or in part."""
    found = {name.removeprefix(PREFIX).split("-")[0] for name in _namespaces() if name.startswith(PREFIX)}
    return sorted(int(text) for text in found if text.isdigit())


def namespaces_of(number: int) -> list[str]:
    """The namespaces of a box."""
    return [name for name in _namespaces() if name.startswith(f"{PREFIX}{number}-")]


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def process_ids(number: int) -> list[int]:
    """The processes that live in a box's namespaces, whoever started them."""
    return [
        int(word) for namespace in namespaces_of(number) for word in command("ip", "netns", "pids", namespace).split()
    ]


def kill_processes(number: int, *, within_s: float = 10.0) -> None:
    """Kills them until none is left. Raises BoxError if some do not die."""
    ends = time.monotonic() + within_s
    while left := process_ids(number):
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        if time.monotonic() > ends:
            raise BoxError(f"box {number}: processes {left} do not end")
        time.sleep(0.02)
