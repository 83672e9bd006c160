"""A node whose disk has no room for another byte of logs still measures: it costs the logs, not the tuning."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crew import Crew
from truth import assert_truthful

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # mounts need root, as namespaces do


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system that is full."""
    root = tmp_path / "full"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "autotune-test", str(root)], check=True)
    try:
        with (root / "everything").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield root
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_tuning_with_a_node_without_room_for_logs(crew: Crew, full: Path) -> None:
    crew.part["b"].end()
    crew.part["b"] = crew.start_node("b", "127.0.0.2", AUTOTUNE_LOG_DIR=str(full))
    crew.wait_ready(crew.part["b"])
    trials, jobs = assert_truthful(crew.store, crew.wait_done(crew.submit(2)))
    assert all(trial.failure is None for trial in trials)
    assert {member.node for job in jobs for member in job.members} == {"a", "b"}
    assert [path.name for path in full.rglob("*") if path.is_file() and path.stat().st_size] == ["everything"]
    crew.part.pop("b").end()
