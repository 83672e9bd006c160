"""What a node hears from the control plane while its ranks work: where their world's store is, and whether to go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from autotune.ports.store import OnProgress
from autotune.specs import FailureKind, MemberOrder, ProbeProgress
from probes.launch.failures import RankFailure

_log = logging.getLogger(__name__)

_ORDER_S = 1.0
_ENDPOINT_S = 0.2


class Order(Protocol):
    """Asks what to do, and renews the member's lease by that."""

    def __call__(self, progress: ProbeProgress | None = None) -> MemberOrder:
        """Must come back within seconds: no rank is heard or killed meanwhile.

        May raise an Exception (the database is away): then all goes on as before. `progress` is the last that rank 0
        told, on its node.
        """


def go_on(progress: ProbeProgress | None = None) -> MemberOrder:
    """The Order of a node that nobody else has a say in."""
    return MemberOrder(go_on=True)


class Orders:
    """The poll of one run (see gathering.gather): asks every second, and more often for the endpoint.

    Args:
        order: asks.
        publish: tells where the store is, as host:port; called again if it raises.
        on_progress: is told of progress at once.
    """

    def __init__(self, order: Order, publish: Callable[[str], object], on_progress: OnProgress | None = None) -> None:
        self._order, self._publish, self._on_progress = order, publish, on_progress
        self._join: Callable[[str, int], None] | None = None
        self._unpublished = ""
        self._due_s = 0.0
        self._progress: ProbeProgress | None = None
        self.measured = False
        """Whether another node has measured what this one takes part in."""

    @property
    def awaits_endpoint(self) -> bool:
        """Whether nobody has said yet where the store is."""
        return self._join is not None

    def await_endpoint(self, join: Callable[[str, int], None]) -> None:
        """Calls `join` once with host and port, when another node has published them."""
        self._join = join

    def host(self, host: str, port: int) -> None:
        """Has it published at the next poll that this node hosts the store."""
        self._unpublished, self._due_s = f"{host}:{port}", 0.0

    def tell(self, progress: ProbeProgress) -> None:
        """Takes progress along at the next poll."""
        self._progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)

    def poll(self) -> RankFailure | None:
        """Asks if it is time to; returns why to stop."""
        if time.monotonic() < self._due_s:
            return None
        try:
            if self._unpublished:
                self._publish(self._unpublished)
                self._unpublished = ""
            order = self._order(self._progress)
            self._take_endpoint(order.endpoint)
        except Exception as error:  # noqa: BLE001 - whoever keeps the lease is away: the measurement goes on
            _log.warning("no order for now: %s", error)
            return None
        finally:
            self._due_s = time.monotonic() + (_ENDPOINT_S if self.awaits_endpoint else _ORDER_S)
        if order.go_on:
            return None
        self.measured = order.measured
        kind = order.failure or FailureKind.CANCELLED
        return RankFailure(rank=None, kind=kind, message=order.reason or f"told to stop: {kind}")

    def _take_endpoint(self, endpoint: str) -> None:
        if self._join is not None and endpoint:
            host, _, port = endpoint.rpartition(":")
            self._join(host, int(port))
            self._join = None
