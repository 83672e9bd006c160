"""`autotune serve`: the HTTP API of a fleet."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output

if TYPE_CHECKING:
    from autotune.queue.sending import CeleryQueue

PORT = 8765


def serve(
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Listen here. Other than loopback needs an API key to exist."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Listen there; 0 takes a free one.")] = PORT,
    db: options.Database = None,
    broker: options.Broker = None,
    rate_limit: Annotated[
        str, typer.Option("--rate-limit", metavar="COUNT/TIME", help="Requests of one key at most.")
    ] = "6000/minute",
) -> None:
    """Serve the HTTP API until SIGTERM or Ctrl-C: tunings, events, best plans, nodes, metrics; GET /openapi.json.

    Bound to loopback it takes requests without a key as long as none was ever made, since whoever is on this machine
    could use the database as well. Beyond this machine put a proxy with TLS before it: keys travel in the clear.
    """
    from autotune.api.access import is_loopback
    from autotune.api.application import create_app
    from autotune.api.server import require_key, run
    from autotune.settings import read_settings
    from autotune.wiring import open_fleet, open_queue, open_store

    settings = read_settings()
    settings = replace(settings, database_url=db or settings.database_url, broker_url=broker or settings.broker_url)
    with closing(open_store(db)) as store, closing(open_queue(settings)) as queue:
        require_key(store, host)
        _warn_without_broker(queue, settings.broker_url)
        with closing(open_fleet(settings, store)) as fleet:
            app = create_app(
                store, fleet, broker_answers=queue.answers, open_locally=is_loopback(host), rate=rate_limit
            )
            run(app, host=host, port=port)


def _warn_without_broker(queue: CeleryQueue, url: str) -> None:
    from autotune.queue.app import shown

    if not queue.answers():
        output.error_console().print(
            f"Warning: the broker {shown(url)} does not answer. Requests are stored; workers get them once it is back.",
            soft_wrap=True,
        )
