"""Real ranks for the tests of probes: shared by a session, restarted by their own pool when a test kills them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_ranks import AMPLE_S, HERE, InsideProber, cpu_cluster

from probes.launch import RankPool


@pytest.fixture(scope="session", autouse=True)
def _rank_environment() -> Iterator[None]:
    """Ranks run one thread each and can import the hazards beside this file."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before["PYTHONPATH"]]))
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def one(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideProber]:
    """A prober of one rank with room for a model that is worth measuring."""
    with InsideProber(cpu_cluster(1, 2 << 30), log_dir=tmp_path_factory.mktemp("one")) as prober:
        yield prober


@pytest.fixture(scope="session")
def pair(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideProber]:
    """A prober of two ranks."""
    with InsideProber(cpu_cluster(2), log_dir=tmp_path_factory.mktemp("pair")) as prober:
        yield prober


@pytest.fixture(scope="session")
def four(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideProber]:
    """A prober of four ranks."""
    with InsideProber(cpu_cluster(4), log_dir=tmp_path_factory.mktemp("four")) as prober:
        yield prober


@pytest.fixture(scope="session")
def _pool(_rank_environment: None) -> Iterator[RankPool]:
    pool = RankPool(cpu_cluster(2), 2)
    yield pool
    pool.close()


@pytest.fixture
def pool(_pool: RankPool, tmp_path: Path) -> RankPool:
    """A started pool of two ranks."""
    if not _pool.lives:
        assert _pool.form(deadline=time.monotonic() + AMPLE_S, log_dir=tmp_path / "start").failure is None
    return _pool
