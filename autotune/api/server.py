"""Runs the app: what `autotune serve` does."""

from __future__ import annotations

import gc
import sys

import uvicorn
from fastapi import FastAPI

from autotune.api.access import is_loopback
from autotune.errors import InputError
from autotune.specs import Role
from autotune.tuning.fleet_ports import FleetStore

DRAIN_S = 5
"""How long answers may go on after SIGTERM; streams of events end at once and are resumed elsewhere."""

TURN_S = 0.0005
"""How long a thread waits until the one that has the interpreter must hand it over; Python's default is ten times that.
The thread that stores requests needs it back after each of a few statements, while the event loop reads new requests:
with the default it waited longer for its turn than it worked."""

COLLECT_AFTER = 10_000
"""Objects made before the youngest are looked through; 700 by default, which is reached by every few requests."""


def require_key(store: FleetStore, host: str) -> None:
    """Refuses to listen beyond this machine while nobody could be told from anybody. Raises InputError."""
    if not is_loopback(host) and not any(store.has_role(role) for role in Role):
        raise InputError("--host", host, "127.0.0.1 until there is an API key: autotune keys create NAME --role admin")


def run(app: FastAPI, *, host: str, port: int) -> None:
    """Listens until SIGTERM or Ctrl-C. Raises InputError for an address that cannot be listened on."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="info", access_log=False, server_header=False, date_header=True,
        proxy_headers=False, timeout_graceful_shutdown=DRAIN_S, h11_max_incomplete_event_size=64 * 1024,
    )  # fmt: skip
    _spare_what_stays()
    sys.setswitchinterval(TURN_S)
    uvicorn.Server(config).run()


def _spare_what_stays() -> None:
    """Takes what was made until now out of garbage collection: to look through it stops all requests for 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
