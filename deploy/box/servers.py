"""The servers of a box: a private PostgreSQL and a private Redis that listen on the bridge only."""

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
_POSTGRES_PORT, _REDIS_PORT = 5432, 6379
# Nothing of a box outlives it, so nothing has to be safe on disk.
_POSTGRES_SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "max_connections": "100"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server: the URL that clients use, and whether it answers."""

    url: str
    is_ready: Callable[[], bool]


def start_postgres(processes: Processes, network: BoxNetwork, folder: Path) -> Server:
    """Makes PostgreSQL's files in `folder`, starts it as `postgres` and creates our database."""
    binaries = _postgres_binaries()
    user = _unprivileged_user()
    password = secrets.token_urlsafe(18)
    data = _make_cluster(network, folder, binaries, user, password)
    settings = {
        **_POSTGRES_SETTINGS,
        "listen_addresses": network.hub_address,
        "port": str(_POSTGRES_PORT),
        "unix_socket_directories": str(folder),
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    words = (str(binaries / "postgres"), "-D", str(data), *options)
    where = f"{network.hub_address}:{_POSTGRES_PORT}"
    server = Server(
        f"postgresql://{_DATABASE}:{password}@{where}/{_DATABASE}",
        lambda: _postgres_answers(f"postgresql://{_DATABASE}:{password}@{where}/postgres"),
    )
    processes.start("postgres", Command(namespace=network.hub, words=words, user=user))
    processes.wait_until("postgres", server.is_ready, within_s=READY_S)
    _create_database(f"postgresql://{_DATABASE}:{password}@{where}/postgres")
    return server


def start_redis(processes: Processes, network: BoxNetwork, folder: Path) -> Server:
    """Starts a Redis that keeps nothing on disk: after a restart it is empty."""
    program = shutil.which("redis-server")
    if program is None:
        raise BoxError("redis-server not found; it is in the package redis-server")
    password = secrets.token_urlsafe(18)
    settings = folder / "redis.conf"
    # In a file, as arguments can be read by everybody.
    settings.touch(mode=0o600)
    lines = (f"bind {network.hub_address}", f"port {_REDIS_PORT}", f"requirepass {password}", f"dir {folder}")
    settings.write_text("\n".join([*lines, 'save ""', "appendonly no", ""]))
    url = f"redis://:{password}@{network.hub_address}:{_REDIS_PORT}/0"
    server = Server(url, lambda: _redis_answers(url))
    processes.start("redis", Command(namespace=network.hub, words=(program, str(settings))))
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
    options = ("-U", _DATABASE, "-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "-N")
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


def _create_database(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {_DATABASE}")


def _redis_answers(url: str) -> bool:
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
        return False
