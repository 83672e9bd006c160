"""Channel: JSON lines over a local stream socket, between the launcher and one rank."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

Message = dict[str, Any]
_CHUNK_BYTES = 1 << 16


class Channel:
    """One end of the conversation. `send` may be called from any thread, `receive` from one."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._rest = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._stream.fileno()

    def send(self, message: Message) -> bool:
        """Sends one message; False if the other end is gone."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._stream.sendall(line)
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Waits for data and returns the messages completed by it (perhaps none); None at the end of the stream."""
        try:
            chunk = self._stream.recv(_CHUNK_BYTES)
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Closes this end."""
        self._stream.close()
