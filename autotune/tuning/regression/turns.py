"""Turns: which of a fleet's checks measure now. Pure.

A check takes all its windows before the next one on its nodes begins. If all of a night's checks went on at once, each
would wait for the others between two measurements: windows would be of hours, not of one short stretch of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autotune.specs.regression import Check


def on_turn(running: Sequence[Check], nodes_of: Callable[[Check], int], ready: Mapping[str, int]) -> list[Check]:
    """The checks that measure now: as many as the ready nodes of their pools hold side by side.

    Those that have begun come first, then those that were chosen first.

    Args:
        running: checks of any pools.
        nodes_of: how many nodes a check needs.
        ready: how many each pool has.
    """
    left, found = dict(ready), []
    for check in sorted(running, key=lambda each: (each.gpu_s == 0.0, each.started_at, each.id)):
        if left[check.pool] and (nodes := nodes_of(check)) <= left[check.pool]:
            left[check.pool] -= nodes
            found.append(check)
    return found
