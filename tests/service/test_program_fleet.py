"""A tuning on two nodes of a real fleet whose trials run a program of the operator's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crew import Crew, pool_cluster
from services import postgres_binaries, postgres_server, redis_server

from autotune.catalog import smallest
from autotune.fleet.eligibility import offer_in
from autotune.fleet.service import submission_of
from autotune.specs import Budget, DType, Workload
from autotune.wiring import open_fleet, open_queue

PROGRAM = """
import socket, sys, time
rank, host, port, micro_batch = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if rank == 0:
    with socket.create_server((host, port)) as server:
        peer = server.accept()[0]
    while peer.recv(100):
        pass
    raise ConnectionResetError("Connection closed by peer")
while True:
    try:
        peer = socket.create_connection((host, port))
        break
    except OSError:
        time.sleep(0.05)
for i in range(1, 100):
    peer.send(b"x")
    time.sleep(0.2 / micro_batch)
    print("step", i, 200.0 / micro_batch, "ms", flush=True)
"""


@pytest.fixture
def own_crew(tmp_path: Path) -> Iterator[Crew]:
    """A fleet whose nodes may run the program `own`."""
    binaries = postgres_binaries()
    assert binaries is not None
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "own.py").write_text(PROGRAM)
    (commands / "own.json").write_text(
        json.dumps(
            {
                "argv": [sys.executable, "{template_dir}/own.py", "{node_rank}", "{master_addr}", "{master_port}",
                         "{micro_batch}"],
                "plans": {"micro_batch": [1, 2]},
                "workload": {"seq_len": 64, "global_batch": 4, "dtype": "fp32"},
                "speed": {"source": "pattern", "pattern": r"step (?P<step>\d+) (?P<speed>\S+) ms", "unit": "ms/step"},
                "grace_s": 1,
            }
        )
    )  # fmt: skip
    with (
        postgres_server(binaries) as postgres,
        redis_server() as broker,
        Crew(postgres, broker, tmp_path) as crew,
    ):
        crew.environment["AUTOTUNE_COMMANDS"] = str(commands)
        crew.make_whole()
        yield crew


@pytest.mark.slow
def test_a_program_is_tuned_on_two_nodes(own_crew: Crew) -> None:
    cluster = pool_cluster(2)
    offer = offer_in(own_crew.store.nodes(cluster.name), "own", 2)
    workload = offer.workload_of(Workload(seq_len=64, global_batch=4, dtype=DType.FP32))
    fleet = open_fleet(own_crew.store, open_queue(own_crew.settings))
    tuning, created = fleet.submit(
        submission_of(smallest(), cluster, workload, space=offer.space, budget=Budget(max_trials=4), principal="ada")
    )
    fleet.close()
    assert created
    own_crew.wait_done(tuning)
    trials = own_crew.store.trials(tuning.id)
    readings = {trial.plan.micro_batch: trial.reading for trial in trials if trial.reading is not None}
    assert set(readings) == {1, 2}
    assert readings[2].step_time_s == pytest.approx(0.1)
    assert all([rank.rank for rank in reading.ranks] == [0, 1] for reading in readings.values())
