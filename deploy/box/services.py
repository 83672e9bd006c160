"""autotune's own processes in a box: the same commands that any installation runs."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from deploy.box.network import NODE_DEVICE, Network
from deploy.box.processes import Command, Processes, run_once

API_PORT = 8765
KEY_NAME = "box"
_READY_S = 120.0
_AUTOTUNE = str(Path(sys.executable).with_name("autotune"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Where they run and what they are told by environment."""

    network: Network
    processes: Processes
    folder: Path
    database_url: str
    broker_url: str

    @property
    def url(self) -> str:
        """The API."""
        return f"http://{self.network.hub_address}:{API_PORT}"

    def migrate(self) -> None:
        """Makes the tables."""
        run_once(self._hub_command("db", "migrate"))

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

    def start_node(self, node: str, cluster: Path, slots: int) -> None:
        """Starts the worker of a node."""
        words = ("worker", "--role", "node", "--name", node, "--cluster", str(cluster), "--slots", str(slots))
        place = ("--address", self.network.address(node), "--interface", NODE_DEVICE, "--topology", node)
        self.processes.start(node, self._command(self.network.namespace(node), node, *words, *place))

    def answers(self) -> bool:
        """Whether the API says that it is healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _hub_command(self, *words: str) -> Command:
        return self._command(self.network.hub, "hub", *words)

    def _command(self, namespace: str, name: str, *words: str) -> Command:
        environment = {
            "AUTOTUNE_DB": self.database_url,
            "AUTOTUNE_BROKER": self.broker_url,
            "AUTOTUNE_LOG_DIR": str(self.folder / "logs" / f"{name}-ranks"),
            # What the one who starts the box uses as a client is not for these.
            "AUTOTUNE_SERVER": "",
            "AUTOTUNE_API_KEY": "",
            # The ranks of all nodes share this machine's cores.
            "OMP_NUM_THREADS": "1",
        }
        return Command(namespace=namespace, words=(_AUTOTUNE, *words), environment=environment)
