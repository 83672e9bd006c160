"""The sweep: whatever a lost message, a crash or a dead node left undone is found in the database and done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TypeVar

from autotune.errors import StoreAwayError
from autotune.fleet.finishing import Merge, finish
from autotune.fleet.health import check_quarantined
from autotune.fleet.scheduling import schedule, send
from autotune.ports.fleet import FleetStore, Queue
from autotune.settings import FleetTimes
from autotune.specs import Job, JobState, Node

log = logging.getLogger("autotune.fleet")

CANARY_AFTER = 0.5
"""After this part of the silence that makes it lost an idle node is asked to prove that it consumes."""

MAX_ADVANCED = 100
"""How many tunings a sweep has advanced, in turns. A thousand that wait for nodes would otherwise fill the tuners'
queue faster than it empties, and new requests would wait behind them."""

ALWAYS_ADVANCED = 5
"""How many are sent even when that many messages wait already. Those are usually of the same tunings, so that more
would only double them; but a message that was lost is still found."""

Item = TypeVar("Item")


def sweep(store: FleetStore, queue: Queue, merge: Merge, times: FleetTimes) -> None:
    """One pass over everything that may be due. Safe at any time, and beside another one.

    One broken record does not keep the others waiting: what an item raises is logged, and the rest goes on. Raises
    StoreAwayError where the database does not answer.
    """
    store.expire_members(grace_s=times.lease_s)
    _each("end job", store.jobs(states={JobState.REPORTED}), lambda job: finish(store, queue, job, merge))
    _each("cancel jobs of", store.abandoned_tunings(), store.cancel_jobs)
    _each("send", store.unsent_members(times.unsent_after_s), lambda job: send(queue, job))
    nodes, leased, now = store.nodes(), store.leased_nodes(), store.now()
    pools = sorted({node.pool for node in nodes})
    _each("check health in", pools, lambda pool: check_quarantined(store, queue, pool))
    _each("schedule", pools, lambda pool: schedule(store, queue, pool))
    most = max(MAX_ADVANCED - queue.backlog(), ALWAYS_ADVANCED)
    _each("advance", store.due_tunings()[:most], queue.advance)
    silent = [node for node in nodes if node.name not in leased and is_canary_due(node, now, times.sweep_every_s)]
    _each("canary", silent, lambda node: queue.canary(node.name, node.session))


def is_canary_due(node: Node, now: datetime, sweep_every_s: float) -> bool:
    """Whether to ask an idle node to prove that it consumes: at once when silent, now and then when lost."""
    age_s = (now - node.heartbeat_at).total_seconds()
    canary_after_s = CANARY_AFTER * node.lost_after_s
    if age_s <= canary_after_s or not node.session:
        return False
    return age_s <= node.lost_after_s or age_s % canary_after_s < sweep_every_s


def _each(what: str, items: Iterable[Item], act: Callable[[Item], object]) -> None:
    for item in items:
        try:
            act(item)
        except StoreAwayError:
            raise
        except Exception:
            log.exception("sweep: could not %s %s", what, item.id if isinstance(item, Job) else item)
