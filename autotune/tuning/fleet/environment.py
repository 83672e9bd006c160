"""The environment of a pool's gangs: the one that all trials of a tuning are measured in, as one fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autotune.specs import Node
from autotune.tuning.fleet_ports import FleetStore


def common_environment(ready: Sequence[Node]) -> str:
    """The environment that most of these nodes have; empty without nodes."""
    counts = Counter(node.environment_key for node in ready)
    return min(counts, key=lambda key: (-counts[key], key), default="")


def gang_fingerprint(store: FleetStore, pool: str, environment_key: str) -> str | None:
    """The key of the fingerprint that all gangs of one environment share, so that they share a profile.

    It is that of one of the pool's nodes, with the pool's name as hostname. None if no node has that environment.
    """
    nodes = store.nodes(pool)
    node = next((each for each in nodes if each.environment_key == environment_key and each.fingerprint_key), None)
    if node is None:
        return None
    return store.put_fingerprint(store.fingerprint(node.fingerprint_key).model_copy(update={"hostname": pool}))
