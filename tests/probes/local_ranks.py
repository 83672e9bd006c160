"""This machine as a cluster of CPU ranks, a prober that looks inside them, and the check that none of them is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from autotune.specs import ClusterSpec
from probes.launch import LocalProber

RANK_MEMORY_BYTES = 512 << 20
# What a busy machine may need to start ranks and run something short; never waited for where all is well.
AMPLE_S = 150.0
HERE = Path(__file__).parent


def cpu_cluster(ranks: int, memory_bytes: int = RANK_MEMORY_BYTES) -> ClusterSpec:
    """This machine as `ranks` CPU devices."""
    device = {"name": "cpu-rank", "kind": "cpu", "memory_bytes": memory_bytes}
    return ClusterSpec.from_data(
        {"name": "here", "nodes": 1, "gpus_per_node": ranks, "device": device, "intra": {"name": "loopback"}}
    )


class InsideProber(LocalProber):
    """A prober whose ranks also run the checks of tests, which look inside a rank."""

    def check(self, module: str, **request: Any) -> dict[int, dict[str, Any]]:
        """What `module.run(request, context)` returns on each rank."""
        return self._ranks.ask(self._share().cluster, module, {"kind": "check", **request})


def assert_gone(processes: list[psutil.Process], within_s: float = 20.0) -> None:
    """None of the processes (recorded with their creation times) is alive after at most `within_s`."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    running = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert running == []
