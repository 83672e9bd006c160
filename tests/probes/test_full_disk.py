"""A disk with no room for logs costs the logs, not the measurement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gangs import SHORT, Gang, gang_cluster
from test_link import command

from autotune.specs import FailureKind
from probes.launch import NodeRanks

# Mounts need root, as namespaces do.
pytestmark = [pytest.mark.netns, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")]


@pytest.fixture(params=["size=64k", "nr_inodes=2"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system without room for another byte, or for another file."""
    root = tmp_path / "full"
    root.mkdir()
    command("mount", "-t", "tmpfs", "-o", request.param, "autotune-test", str(root))
    try:
        with (root / "everything").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while request.param.startswith("size"):
                file.write(bytes(4096))
        yield root
    finally:
        command("umount", str(root))


@pytest.mark.usefixtures("_rank_environment")
def test_probes_run_without_room_for_logs(full: Path) -> None:
    node = NodeRanks(log_root=full, interface="lo", address="127.0.0.1")
    with Gang(gang_cluster(gpus_per_node=2, nodes=1), [node]) as gang:
        assert gang.run(SHORT).failure is None
        # A refusal prints a traceback into its log.
        failure = gang.run(SHORT.model_copy(update={"group_size": 3}), warm=True).failure
        assert failure is not None
        assert failure.kind is FailureKind.ILLEGAL
        assert "must divide the 2 ranks" in failure.message
        assert failure.log_tail == ""
        assert gang.run(SHORT, warm=True).failure is None
    assert not [path for path in full.rglob("*.log") if path.stat().st_size]
