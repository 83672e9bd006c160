"""The users of deploy/redis/users.sh on a real Redis, and TLS to it. That they do their work, tests of fleets show."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from kombu import pools
from services import BROKER_USERS, RedisServer, redis_server

from autotune.settings import read_settings
from autotune.wiring import open_queue

HARM = (
    "FLUSHALL", "CONFIG GET dir", "SAVE", "SHUTDOWN NOSAVE", "KEYS *", "MONITOR", "ACL LIST", "CLIENT LIST",
    "REPLICAOF 10.0.0.1 6379", "MODULE LIST", "EVAL return(1) 0", "FUNCTION FLUSH", "PUBLISH tuner x",
    "SET other x", "GET other",
)  # fmt: skip
OF_TUNERS = ("BRPOP tuner 1", "RPOP tuner", "LRANGE tuner 0 -1", "LPUSH sweep x", "BRPOP sweep 1")


@pytest.mark.parametrize("command", [*HARM, *OF_TUNERS])
def test_a_node_may_not(broker: RedisServer, command: str) -> None:
    with redis.Redis.from_url(broker.node_url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


@pytest.mark.parametrize("command", HARM)
def test_the_control_plane_may_not(broker: RedisServer, command: str) -> None:
    with redis.Redis.from_url(broker.url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_nobody_comes_in_without_a_password(broker: RedisServer, tmp_path: Path) -> None:
    wrong = broker.url.replace(":between-us@", ":guessed@")
    with redis.Redis.from_url(wrong) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
    secret = tmp_path / "secret"
    secret.write_text("kept apart")
    files = {"BROKER_PASSWORD_FILE": str(secret), "NODE_PASSWORD_FILE": str(secret)}
    printed = subprocess.run(["sh", BROKER_USERS], env=os.environ | files, capture_output=True, text=True, check=True)
    assert printed.stdout.startswith("user default off\n")
    assert "kept apart" not in printed.stdout
    secret.write_text("\n")
    empty = subprocess.run(["sh", BROKER_USERS], env=os.environ | files, capture_output=True, text=True, check=False)
    assert empty.returncode != 0
    assert "is empty" in empty.stderr


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Path]]:
    """A server that also speaks TLS, on the port after its own, as `localhost`; and who vouches for it: itself."""
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    made = [*words.split(), "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    with redis_server() as server, server.client as client:
        for name, value in (
            ("tls-cert-file", folder / "certificate.pem"),
            ("tls-key-file", folder / "key.pem"),
            ("tls-ca-cert-file", folder / "certificate.pem"),
            ("tls-auth-clients", "no"),
            ("tls-port", server.port + 1),
        ):
            client.config_set(name, str(value))
        yield server, folder / "certificate.pem"


@pytest.mark.parametrize(
    ("host", "options", "answers"),
    [
        ("localhost", "?ssl_ca_certs={ca}", True),
        ("localhost", "?ssl_cert_reqs=none", True),  # said in so many words
        ("localhost", "", False),  # nobody that this machine trusts vouches for it
        ("127.0.0.1", "?ssl_ca_certs={ca}", False),  # it is called otherwise
    ],
)
def test_a_broker_with_tls_proves_who_it_is(
    secure: tuple[RedisServer, Path], host: str, options: str, answers: bool
) -> None:
    server, certificate = secure
    url = server.url.replace("redis://", "rediss://").replace(f"127.0.0.1:{server.port}", f"{host}:{server.port + 1}")
    settings = replace(read_settings({}), broker_url=url + options.format(ca=certificate))
    pools.reset()  # to kombu a connection is that to host and port, whatever was asked of its certificate
    with closing(open_queue(settings)) as queue:
        assert queue.answers() is answers
        assert queue.sweep() is answers
