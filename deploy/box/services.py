"""autotune's own processes in a box: the same commands that any installation runs."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from deploy.box.network import NODE_DEVICE, BoxNetwork
from deploy.box.processes import BoxError, Command, Processes, run_once
from deploy.box.servers import NODE_ROLE, Server

API_PORT = 8765
KEY_NAME = "box"
_READY_S = 300.0  # for a busy machine
_AUTOTUNE = str(Path(sys.executable).with_name("autotune"))
# A proxy that the environment names knows nothing of a box.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Where they run and what they are told by environment."""

    network: BoxNetwork
    processes: Processes
    folder: Path
    database: Server
    broker: Server
    ranks: int

    @property
    def url(self) -> str:
        """The API."""
        return f"http://{self.network.hub_address}:{API_PORT}"

    def migrate(self) -> None:
        """Makes the tables, and lets nodes use what they need."""
        run_once(self._hub_command("db", "migrate"))
        run_once(self._hub_command("db", "grant", NODE_ROLE))

    def create_key(self) -> str:
        """A new API key that may do everything."""
        printed = run_once(self._hub_command("keys", "create", KEY_NAME, "--role", "admin", "--json"))
        return str(json.loads(printed)["secret"])

    def start_control_plane(self) -> None:
        """Starts API, tuner and beat; returns when the API answers."""
        self.processes.start(
            "api", self._hub_command("serve", "--host", self.network.hub_address, "--port", str(API_PORT))
        )
        self.processes.start("tuner", self._hub_command("worker", "--role", "tuner", "--name", "tuner"))
        self.processes.start("beat", self._hub_command("beat"))
        self.processes.wait_until("api", self.answers, within_s=_READY_S)

    def start_nodes(self, cluster: Path, key: str) -> None:
        """Starts the workers of all nodes; returns when all have registered."""
        for node in self.network.names:
            self._start_node(node, cluster)
        for node in self.network.names:
            self.processes.wait_until(node, partial(self._knows, node, key), within_s=_READY_S)

    def _start_node(self, node: str, cluster: Path) -> None:
        words = ("worker", "--role", "node", "--name", node, "--cluster", str(cluster), "--slots", str(self.ranks))
        place = ("--address", self.network.address(node), "--interface", NODE_DEVICE, "--topology", node)
        own = {"AUTOTUNE_DB": self.database.node_url, "AUTOTUNE_BROKER": self.broker.node_url}
        command = self._command(self.network.namespace(node), node, *words, *place)
        self.processes.start(node, replace(command, environment={**command.environment, **own}))

    def answers(self) -> bool:
        """Whether the API says that it is healthy."""
        try:
            self.ask("/healthz")
        except (BoxError, OSError):
            return False
        return True

    def ask(self, path: str, body: object = None, *, key: str = "", method: str | None = None) -> Any:
        """An answer of the API: of a GET, or of a POST of `body`.

        Raises BoxError with the problem it reports, and with the end of its log if the fault is its own.
        """
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, headers=headers, data=data, method=method)
        try:
            with _DIRECT.open(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            log = f"\n{self.processes.tail('api')}" if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
            raise BoxError(f"{path}: {error.code} {error.read().decode()}{log}") from None

    def _knows(self, node: str, key: str) -> bool:
        return any(each["name"] == node for each in self.ask("/nodes", key=key)["nodes"])

    def _hub_command(self, *words: str) -> Command:
        return self._command(self.network.hub, "hub", *words)

    def _command(self, namespace: str, name: str, *words: str) -> Command:
        environment = {
            "AUTOTUNE_DB": self.database.url,
            "AUTOTUNE_BROKER": self.broker.url,
            "AUTOTUNE_LOG_DIR": str(self.folder / "logs" / f"{name}-ranks"),
            # The client settings of whoever starts the box are not for these processes.
            "AUTOTUNE_SERVER": "",
            "AUTOTUNE_API_KEY": "",
            # The ranks of all nodes share this machine's cores.
            "OMP_NUM_THREADS": "1",
        }
        return Command(namespace=namespace, words=(_AUTOTUNE, *words), environment=environment)
