"""Turns: which of a fleet's checks measure now. Pure.

A check takes all its windows before the next one on its nodes begins. If all of a night's checks went on at once, each
would wait for the others between two measurements: windows would be of hours, not of one short stretch of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autotune.specs.regression import Check


def on_turn(
    running: Sequence[Check], nodes_of: Callable[[Check], int], ready: Mapping[tuple[str, str], int]
) -> list[Check]:
    """The checks that measure now: as many as the ready nodes of their pools and environments hold side by side.

    Those that have begun come first, then those that were chosen first.

    Args:
        running: checks of any pools.
        nodes_of: how many nodes a check needs.
        ready: how many there are of each pool and environment key; under an empty key, of any environment.
    """
    left, found = dict(ready), []
    for check in sorted(running, key=lambda each: (each.gpu_s == 0.0, each.started_at, each.id)):
        where = (check.pool, check.environment_key)
        if (nodes := nodes_of(check)) <= left.get(where, 0):
            left[where] -= nodes
            found.append(check)
    return found
