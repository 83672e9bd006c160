"""A program on two nodes: they meet, one of them tells the speed, and both are ended; or one fails, and both are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gangs import Gang, gang_cluster
from programs import Bench

from autotune.specs import FailureKind, StepReading
from autotune.specs.command import CommandBook
from probes.launch import NodeRanks

MEET = """
import socket, sys, time
rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if rank == 0:
    with socket.create_server((host, port)) as server:
        peer = server.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection((host, port))
            break
        except OSError:
            time.sleep(0.05)
"""
LAST_TELLS = """
if rank == 0:
    while peer.recv(100):
        pass
    raise ConnectionResetError("Connection closed by peer")
for i in range(1, 100):
    peer.send(b"x")
    time.sleep(0.05)
    print("step", i, 50.0 + i % 2, "ms", flush=True)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def gang_of(bench: Bench) -> Gang:
    book = CommandBook(bench.folder)
    return Gang(gang_cluster(), [NodeRanks(log_root=bench.folder / name, commands=book) for name in ("a", "b")])


def command(bench: Bench, code: str) -> str:
    argv = [sys.executable, "{template_dir}/program.py", "{node_rank}", "{master_addr}", "{master_port}", "{nnodes}"]
    return bench.write(code, argv=argv)


def test_the_node_that_is_told_the_speed_speaks_for_all(bench: Bench) -> None:
    with gang_of(bench) as gang:
        outcome = gang.run(bench.request(command(bench, MEET + LAST_TELLS)))
        assert outcome.failure is None, outcome.failure
        (reading,) = outcome.readings
        assert isinstance(reading, StepReading)
        assert [rank.rank for rank in reading.ranks] == [0, 1]
        assert 0.05 <= reading.step_time_s <= 0.051
        assert reading.tokens_per_s_per_gpu == pytest.approx(16 * 32 / reading.step_time_s / 2)


def test_the_first_cause_is_told_and_the_other_node_is_ended(bench: Bench) -> None:
    fails = "if rank == 1: raise ValueError('no such dataset')\n" + LAST_TELLS
    with gang_of(bench) as gang:
        outcome = gang.run(bench.request(command(bench, MEET + fails)))
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.CRASH
    assert outcome.failure.message == (
        "node node-b: own: the program exited with status 1: ValueError: no such dataset"
    )
