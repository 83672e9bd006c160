"""The users of deploy/redis/users.sh on a real Redis. That they can do their work, all tests of fleets show."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import redis
from services import BROKER_USERS, RedisServer

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
