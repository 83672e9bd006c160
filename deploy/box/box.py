"""The box itself: brings everything up in order, and is the handle by which tests disturb it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

import yaml

from deploy.box.network import BoxNetwork, make_network
from deploy.box.processes import Processes
from deploy.box.removal import Remover, fresh_folder
from deploy.box.servers import Server, start_postgres, start_redis
from deploy.box.services import Services

POOL = "box"


class Box:
    """A cluster of `nodes` nodes of `ranks` CPU ranks each, up when the constructor returns; `close` removes it.

    Processes are called api, tuner, beat, postgres, redis, and the worker of a node like the node.

    Args:
        nodes: How many nodes; each is a network namespace with a worker.
        ranks: CPU ranks a node, its "GPUs".
        rate_mbit: Speed of each node's link, Mbit/s in each direction.
        memory_mib: What one rank may use.

    Raises:
        BoxError: Something did not start; the message has the tail of its log. Nothing is left behind.
    """

    def __init__(self, *, nodes: int = 2, ranks: int = 4, rate_mbit: float = 400.0, memory_mib: int = 768) -> None:
        self.network: BoxNetwork = make_network(nodes, rate_mbit)
        self._watch = Remover(self.network.number)
        self.folder = fresh_folder(self.network.number)
        self.processes = Processes(self.folder / "logs")
        try:
            database = start_postgres(self.processes, self.network, self.folder / "postgres")
            broker = start_redis(self.processes, self.network, self.folder)
            self.database_url, self.broker_url = database.url, broker.url
            self.cluster_file = self.folder / "cluster.yaml"
            self.cluster_file.write_text(yaml.safe_dump(box_cluster(nodes, ranks, rate_mbit, memory_mib)))
            self._services = self._start_services(database, broker, ranks)
        except BaseException:
            self.close()
            raise

    def _start_services(self, database: Server, broker: Server, ranks: int) -> Services:
        services = Services(
            network=self.network,
            processes=self.processes,
            folder=self.folder,
            database=database,
            broker=broker,
            ranks=ranks,
        )
        services.migrate()
        self.key = services.create_key()
        services.start_control_plane()
        services.start_nodes(self.cluster_file, self.key)
        return services

    @property
    def url(self) -> str:
        """The API; `key` is a key that may do everything."""
        return self._services.url

    def ask(self, path: str, body: object = None, *, method: str | None = None) -> Any:
        """An answer of the API, as data: of a GET, or of a POST of `body`. Raises BoxError with its problem."""
        return self._services.ask(path, body, key=self.key, method=method)

    @property
    def nodes(self) -> list[str]:
        """The nodes' names."""
        return self.network.names

    @property
    def pids(self) -> Mapping[str, int]:
        """The process ids of what runs, by name."""
        return self.processes.pids

    def set_rate(self, node: str, rate_mbit: float) -> None:
        """Changes the speed of a node's link, both directions."""
        self.network.set_rate(node, rate_mbit)

    def link_down(self, node: str) -> None:
        """Takes a node off the network, from everything: other nodes, broker, database."""
        self.network.link_down(node)

    def link_up(self, node: str) -> None:
        """Puts it back."""
        self.network.link_up(node)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process by a signal and waits until it has."""
        self.processes.stop(name, number=number)

    def start(self, name: str, environment: Mapping[str, str] = MappingProxyType({})) -> int:
        """Starts a process that has ended again, as it was but for these variables of its environment."""
        command = self.processes.command(name)
        return self.processes.start(name, replace(command, environment={**command.environment, **environment}))

    def keep(self) -> None:
        """Leaves the box running when this process ends; `python -m deploy.box down` removes it."""
        self._watch.keep()

    def close(self) -> None:
        """Ends every process and removes everything, unless the box is kept."""
        if self._watch.end():
            self.processes.reap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def box_cluster(nodes: int, ranks: int, rate_mbit: float, memory_mib: int) -> dict[str, Any]:
    """What a worker registers for: the cluster as a file says it. The machine's cores are shared by the nodes."""
    cores = max(1, len(os.sched_getaffinity(0)) // nodes)
    return {
        "name": POOL,
        "nodes": nodes,
        "gpus_per_node": ranks,
        "device": {"name": "cpu-rank", "kind": "cpu", "memory_bytes": memory_mib << 20},
        "intra": {"name": "loopback"},
        "inter": {"name": "veth", "bytes_per_s": rate_mbit * 1e6 / 8, "source": "set by tc"},
        "node_cores": cores,
    }
