"""Real services for tests: private PostgreSQL and Redis servers, started and ended by their process ids."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
import redis

from storage.care.roles import grant_node

USER, NODE_USER, PASSWORD = "autotune", "autotune_node", "between-us"
START_S = 20.0
BROKER_USERS = Path(__file__).resolve().parents[1] / "deploy/redis/users.sh"
SETTINGS = "-c fsync=off -c max_connections=60 -c shared_buffers=16MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresServer:
    """A running server on this machine."""

    port: int
    binaries: Path
    directory: Path
    superuser: str

    def start(self) -> None:
        """Starts it and waits until it answers; its output goes to a file, as the server keeps it open."""
        options = f"-c port={self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.directory}"
        self._control("start", "-o", f"{SETTINGS} {options}", "-l", self.directory / "log")

    def stop(self) -> None:
        """Ends it as a crash would."""
        self._control("stop", "-m", "immediate")

    def restart(self) -> None:
        """Ends it as a crash would, and waits until it answers again."""
        self.stop()
        self.start()

    def _control(self, *command: str | Path) -> None:
        _run([self.binaries / "pg_ctl", "-w", "-D", self.directory / "data", *command])

    def url(self, database: str = "postgres", *, user: str = "", password: str = PASSWORD) -> str:
        """The URL of one of its databases, by default as the superuser."""
        return f"postgresql://{user or self.superuser}:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Runs one statement outside any transaction."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    def create_database(self, template: str = "template1") -> str:
        """A new database, empty or a copy of one that nobody is connected to; returns its name."""
        name = f"test_{uuid4().hex}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def node_url(self, database: str) -> str:
        """The URL of a database of ours for a node worker, whose role is granted its rights there."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [NODE_USER]).rowcount:
                connection.execute(f"CREATE ROLE {NODE_USER} LOGIN PASSWORD '{PASSWORD}'")
        grant_node(self.url(database), NODE_USER)
        return self.url(database, user=NODE_USER)


def postgres_binaries() -> Path | None:
    """The directory of initdb and pg_ctl: on PATH, or Debian's newest; None if PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return installed[-1].parent if installed else None


@contextmanager
def postgres_server(binaries: Path, superuser: str = USER) -> Iterator[PostgresServer]:
    """Starts a server on a free port with a data directory of its own; ends it and removes its data."""
    # Not below pytest's directories: those are closed to the user that the server must run as under root.
    directory = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
    data = directory / "data"
    try:
        secret = directory / "password"
        secret.write_text(PASSWORD)
        for path in (directory, secret):
            _give_away(path)
        options = ["-U", superuser, "-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "-N"]
        _run([binaries / "initdb", "-D", data, *options])
        server = PostgresServer(port=_free_port(), binaries=binaries, directory=directory, superuser=superuser)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


class RedisServer:
    """A running server on this machine without persistence.

    It has the users of a deployed one, and beside them the default one, without a password, for the tests themselves.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = _free_port()
        (directory / "users.acl").write_text(f"{broker_users(directory)}user default on nopass ~* &* +@all\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """The URL of its database 0, for API, tuners and beat."""
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def node_url(self) -> str:
        """The URL for a node worker."""
        return f"redis://{NODE_USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        """A client of its database 0 that may do everything."""
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2)

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        options += ["--aclfile", str(self._directory / "users.acl")]
        command = ["redis-server", *options, "--dir", str(self._directory), "--logfile", "redis.log"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self.client as client:
                    client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and what is sent, and answers nothing until the end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills it, and with it all that it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def broker_users(folder: Path) -> str:
    """The users of a deployed Redis, but for the default one, which is off there."""
    (folder / "password").write_text(PASSWORD)
    files = dict.fromkeys(("BROKER_PASSWORD_FILE", "NODE_PASSWORD_FILE"), str(folder / "password"))
    words = ["sh", BROKER_USERS]
    printed = subprocess.run(words, env=os.environ | files, capture_output=True, text=True, check=True).stdout
    return printed.replace("user default off\n", "")


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server on a free port with a directory of its own; ends it and removes what it wrote."""
    with tempfile.TemporaryDirectory(prefix="autotune-redis-") as directory:
        server = RedisServer(Path(directory))
        try:
            yield server
        finally:
            server.stop()


def _run(command: list[str | Path]) -> None:
    identity = _server_identity()
    as_user = {} if identity is None else {"user": identity.pw_uid, "group": identity.pw_gid, "extra_groups": []}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", timeout=120, check=False, **as_user
    )  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")


def _server_identity() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root; anybody else runs it as himself."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _give_away(path: Path) -> None:
    identity = _server_identity()
    if identity is not None:
        os.chown(path, identity.pw_uid, identity.pw_gid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
