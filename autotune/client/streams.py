"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def server_sent(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event of a stream of lines. Comments, and an event that the stream broke off in, are dropped."""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
