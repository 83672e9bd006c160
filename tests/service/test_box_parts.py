"""What a box is made of: links of a known speed, servers on the bridge only, and an end by number or by death."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.box.network import BoxNetwork, make_network, namespaces_of, numbers, process_ids
from deploy.box.processes import Command, Processes, run_once
from deploy.box.removal import ROOT, Remover, folder_of, fresh_folder, remove
from deploy.box.servers import Server, start_postgres, start_redis

RATE_MBIT = 80.0
TOLERANCE = 0.15

pytestmark = pytest.mark.netns


@dataclass(frozen=True, slots=True)
class Ground:
    network: BoxNetwork
    processes: Processes


@contextmanager
def ground(nodes: int = 2) -> Iterator[Ground]:
    network = make_network(nodes, RATE_MBIT)
    watch = Remover(network.number)
    processes = Processes(fresh_folder(network.number) / "logs")
    try:
        yield Ground(network, processes)
    finally:
        watch.end()
        processes.reap()
    assert network.number not in numbers()
    assert not folder_of(network.number).exists()


@pytest.fixture(scope="module")
def box() -> Iterator[Ground]:
    with ground() as made:
        yield made


RECEIVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    received, first, started = 0, len(connection.recv(1 << 20)), time.perf_counter()
    while chunk := connection.recv(1 << 20):
        received += len(chunk)
    print(received / (time.perf_counter() - started))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def python(namespace: str, program: str, *arguments: str) -> list[str]:
    return Command(namespace=namespace, words=(sys.executable, "-I", "-S", "-c", program, *arguments)).full()


def transfer_bytes_per_s(network: BoxNetwork, sender: str, receiver: str, size_bytes: int) -> float:
    """What a TCP connection from one node to another reaches, at the better one of two times."""
    return max(_reached_bytes_per_s(network, sender, receiver, size_bytes) for _ in range(2))


def _reached_bytes_per_s(network: BoxNetwork, sender: str, receiver: str, size_bytes: int) -> float:
    address = network.address(receiver)
    listening = python(network.namespace(receiver), RECEIVER, address)
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        words = python(network.namespace(sender), SENDER, address, str(size_bytes))
        subprocess.run(words, check=True, timeout=60)
        return float(process.stdout.readline())


@pytest.mark.parametrize(("sender", "receiver"), [("node0", "node1"), ("node1", "node0")])
def test_a_link_has_its_rate_in_each_direction(box: Ground, sender: str, receiver: str) -> None:
    reached = transfer_bytes_per_s(box.network, sender, receiver, 10_000_000)
    assert reached == pytest.approx(RATE_MBIT * 1e6 / 8, rel=TOLERANCE)


def test_the_rate_of_one_node_can_change(box: Ground) -> None:
    box.network.set_rate("node1", RATE_MBIT / 4)
    try:
        reached = transfer_bytes_per_s(box.network, "node0", "node1", 3_000_000)
        assert reached == pytest.approx(RATE_MBIT * 1e6 / 8 / 4, rel=TOLERANCE)
    finally:
        box.network.set_rate("node1", RATE_MBIT)


REACH = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
"""


def reaches(network: BoxNetwork, node: str, port: int, timeout_s: float) -> bool:
    words = python(network.namespace(node), REACH, network.hub_address, str(port), str(timeout_s))
    return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture(scope="module")
def redis_server(box: Ground) -> Server:
    return start_redis(box.processes, box.network, folder_of(box.network.number))


@pytest.fixture(scope="module")
def postgres(box: Ground) -> Server:
    return start_postgres(box.processes, box.network, folder_of(box.network.number) / "postgres")


@pytest.mark.usefixtures("redis_server")
def test_a_node_whose_link_is_down_reaches_nothing_until_it_is_up(box: Ground) -> None:
    assert reaches(box.network, "node0", 6379, 10)
    box.network.link_down("node0")
    assert not reaches(box.network, "node0", 6379, 0.5)
    assert reaches(box.network, "node1", 6379, 10)
    box.network.link_up("node0")
    assert reaches(box.network, "node0", 6379, 30)


def test_servers_want_a_password_and_listen_on_the_bridge_only(
    box: Ground, redis_server: Server, postgres: Server
) -> None:
    assert redis_server.is_ready()
    assert postgres.is_ready()
    with (
        redis.Redis(host=box.network.hub_address, retry=Retry(NoBackoff(), 0)) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres.url.replace("//autotune:", "//autotune:x"))
    listening = json.loads(_listening(box.network))
    assert set(listening) == {f"{box.network.hub_address}:6379", f"{box.network.hub_address}:5432"}


LISTENING = """
import json, socket
with open("/proc/self/net/tcp") as table:
    rows = [line.split() for line in table][1:]
def text(field):
    address, port = field.split(":")
    return f"{socket.inet_ntoa(bytes.fromhex(address)[::-1])}:{int(port, 16)}"
print(json.dumps([text(row[1]) for row in rows if row[3] == "0A"]))
"""


def _listening(network: BoxNetwork) -> str:
    words = (sys.executable, "-I", "-S", "-c", LISTENING)
    return run_once(Command(namespace=network.hub, words=words))


def test_a_redis_that_restarts_is_empty(box: Ground, redis_server: Server) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.lpush("tuner", "value")
    box.processes.stop("redis")
    box.processes.start("redis")
    box.processes.wait_until("redis", redis_server.is_ready, within_s=30)
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.llen("tuner") == 0


def test_a_folder_that_was_left_is_not_taken_over() -> None:
    number = 250
    (fresh_folder(number) / "logs" / "old.log").touch()
    try:
        assert list(fresh_folder(number).rglob("*.log")) == []
    finally:
        shutil.rmtree(folder_of(number))


def test_boxes_live_side_by_side(box: Ground) -> None:
    with ground(nodes=1) as other:
        assert other.network.number != box.network.number
        assert not other.network.subnet.overlaps(box.network.subnet)
        assert {box.network.number, other.network.number} <= set(numbers())
    assert box.network.number in numbers()


MAKER = """
import sys, time
from deploy.box.network import make_network
from deploy.box.processes import Command, Processes
from deploy.box.removal import folder_of, fresh_folder
from deploy.box.servers import start_postgres
from deploy.box.removal import Remover
network = make_network(1, 100.0)
watch = Remover(network.number) if sys.argv[1] != "alone" else None
if sys.argv[1] == "kept":
    watch.keep()
    assert not watch.end()
processes = Processes(fresh_folder(network.number) / "logs")
start_postgres(processes, network, folder_of(network.number) / "postgres")
processes.start("sleeper", Command(namespace=network.namespace("node0"), words=("sleep", "600")))
print(network.number, watch.pid if watch else 0, flush=True)
time.sleep(600)
"""


def made_and_killed(how: str) -> tuple[int, list[psutil.Process]]:
    """A box whose maker got SIGKILL: its number and the processes that were in it."""
    maker = subprocess.Popen([sys.executable, "-c", MAKER, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with maker:
        try:
            assert maker.stdout is not None
            number, watch = map(int, maker.stdout.readline().split())
            # Taken before the kill, as the watch is quick.
            inside = living(process_ids(number))
            watching = living([watch] if watch else [])
        finally:
            maker.send_signal(signal.SIGKILL)
    assert len(inside) > 2
    psutil.wait_procs(watching, timeout=60)
    return number, inside


def living(pids: list[int]) -> list[psutil.Process]:
    """The processes; PostgreSQL's may end at any moment."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def test_a_box_whose_maker_is_killed_removes_itself() -> None:
    number, inside = made_and_killed("watched")
    assert not any(process.is_running() for process in inside)
    assert namespaces_of(number) == []
    assert not folder_of(number).exists()


@pytest.mark.parametrize("how", ["alone", "kept"])
def test_a_box_that_nobody_watches_is_removed_by_its_number(how: str) -> None:
    number, inside = made_and_killed(how)
    assert namespaces_of(number) != []
    command = [sys.executable, "-m", "deploy.box", "down", str(number)]
    at_once = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [each.wait(timeout=60) for each in at_once] == [0, 0, 0]
    _, alive = psutil.wait_procs(inside, timeout=20)
    assert alive == []
    assert number not in numbers()
    remove(number)  # nothing is left, and that is no error
