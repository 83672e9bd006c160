"""The servers of a box: a private PostgreSQL and a private Redis that listen on the bridge only.

Their roles and users are those of any installation (deploy/postgres, deploy/redis).
"""

from __future__ import annotations

import pwd
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.box.network import BoxNetwork, process_ids
from deploy.box.processes import BoxError, Command, Processes, run_once, send_signal

READY_S = 120.0
_DATABASE = "autotune"
_SUPERUSER = "postgres"
NODE_ROLE = "autotune_node"
_ROLES = Path(__file__).parents[1] / "postgres/roles.sql"
_USERS = Path(__file__).parents[1] / "redis/users.sh"
_POSTGRES_PORT, _REDIS_PORT = 5432, 6379
# Nothing of a box outlives it, so nothing has to be safe on disk.
_POSTGRES_SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "max_connections": "100"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server: the URL for the control plane, that for nodes, and whether it answers."""

    url: str
    node_url: str
    is_ready: Callable[[], bool]


def start_postgres(processes: Processes, network: BoxNetwork, folder: Path) -> Server:
    """Makes PostgreSQL's files in `folder`, starts it as `postgres` and creates our database."""
    binaries = _postgres_binaries()
    user = _unprivileged_user()
    superuser, owner, of_node = (secrets.token_urlsafe(18) for _ in range(3))
    data = _make_cluster(network, folder, binaries, user, superuser)
    settings = {
        **_POSTGRES_SETTINGS,
        "listen_addresses": network.hub_address,
        "port": str(_POSTGRES_PORT),
        "unix_socket_directories": str(folder),
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    words = (str(binaries / "postgres"), "-D", str(data), *options)
    where = f"{network.hub_address}:{_POSTGRES_PORT}"
    above = f"postgresql://{_SUPERUSER}:{superuser}@{where}/postgres"
    server = Server(
        url=f"postgresql://{_DATABASE}:{owner}@{where}/{_DATABASE}",
        node_url=f"postgresql://{NODE_ROLE}:{of_node}@{where}/{_DATABASE}",
        is_ready=lambda: _postgres_answers(above),
    )
    processes.start("postgres", Command(namespace=network.hub, words=words, user=user))
    processes.wait_until("postgres", server.is_ready, within_s=READY_S)
    files = _in_files(folder, OWNER_PASSWORD_FILE=owner, NODE_PASSWORD_FILE=of_node, PGPASSFILE=f"*:*:*:*:{superuser}")
    script = (
        str(binaries / "psql"),
        "-X",
        "-q",
        "-d",
        f"postgresql://{_SUPERUSER}@{where}/postgres",
        "-f",
        str(_ROLES),
    )
    run_once(Command(namespace=network.hub, words=script, environment=files))
    return server


def start_redis(processes: Processes, network: BoxNetwork, folder: Path) -> Server:
    """Starts a Redis that keeps nothing on disk: after a restart it is empty."""
    program = shutil.which("redis-server")
    if program is None:
        raise BoxError("redis-server not found; it is in the package redis-server")
    owner, of_node = (secrets.token_urlsafe(18) for _ in range(2))
    files = _in_files(folder, BROKER_PASSWORD_FILE=owner, NODE_PASSWORD_FILE=of_node)
    users = folder / "users.acl"
    users.touch(mode=0o600)
    users.write_text(run_once(Command(namespace=network.hub, words=("sh", str(_USERS)), environment=files)))
    where = f"{network.hub_address}:{_REDIS_PORT}/0"
    url = f"redis://autotune:{owner}@{where}"
    server = Server(url=url, node_url=f"redis://{NODE_ROLE}:{of_node}@{where}", is_ready=lambda: _redis_answers(url))
    options = {"bind": network.hub_address, "port": str(_REDIS_PORT), "dir": str(folder), "aclfile": str(users)}
    settings = [word for name, value in options.items() for word in (f"--{name}", value)]
    words = (program, *settings, "--save", "", "--appendonly", "no")
    processes.start("redis", Command(namespace=network.hub, words=words))
    processes.wait_until("redis", server.is_ready, within_s=READY_S)
    return server


def quit_postgres(number: int, folder: Path) -> None:
    """Tells a box's PostgreSQL to give up at once; it then frees its shared memory, which SIGKILL would leave."""
    file = folder / "data" / "postmaster.pid"
    if not file.is_file():
        return
    pid = int(file.read_text().split()[0])
    if pid in process_ids(number) and send_signal(pid, signal.SIGQUIT):
        _wait_for_end(pid, number)


def _wait_for_end(pid: int, number: int) -> None:
    ends = time.monotonic() + 5.0
    while pid in process_ids(number) and time.monotonic() < ends:
        time.sleep(0.02)


def _make_cluster(network: BoxNetwork, folder: Path, binaries: Path, user: str, password: str) -> Path:
    data, secret = folder / "data", folder / "password"
    folder.mkdir()
    secret.touch(mode=0o600)
    secret.write_text(password)
    for path in (folder, secret):
        shutil.chown(path, user)
    options = ("-U", _SUPERUSER, "-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "-N")
    words = (str(binaries / "initdb"), "-D", str(data), *options)
    run_once(Command(namespace=network.hub, words=words, user=user))
    secret.unlink()
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {network.subnet} scram-sha-256\n")
    return data


def _postgres_binaries() -> Path:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not installed:
        raise BoxError("PostgreSQL not found; it is in the package postgresql")
    return installed[-1].parent


def _unprivileged_user() -> str:
    """PostgreSQL refuses to run as root."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _postgres_answers(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _in_files(folder: Path, **secret_of: str) -> dict[str, str]:
    """Writes each secret to a file that only we can read; returns the files by the same names."""
    for name, secret in secret_of.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(secret)
    return {name: str(folder / name) for name in secret_of}


def _redis_answers(url: str) -> bool:
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
        return False
