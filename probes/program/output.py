"""What a program prints: read as it comes, kept within bounds, and what it says of a failure."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

from autotune.specs import FailureKind
from probes.launch.failures import kind_of_text, precedence

HEAD_BYTES, TAIL_BYTES = 4 << 20, 256 << 10
LONGEST_LINE_BYTES = 64 << 10
MAX_COMPLAINTS = 200


class Output:
    """A program's output: its beginning goes to a file, its end is kept and follows when it is closed.

    Args:
        path: of the file; where it cannot be written, nothing is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._written = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = self._left_out_bytes = 0
        self._rest = b""
        self._complaints: list[str] = []
        self.count_bytes = self.count_lines = 0
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")

    def take(self, chunk: bytes) -> list[bytes]:
        """Takes what was read, and returns the lines that it completes. A line that is too long comes in pieces."""
        self.count_bytes += len(chunk)
        self._keep(chunk)
        *lines, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self.count_lines += len(lines)
        self._note(lines)
        return lines

    def end(self) -> list[bytes]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        lines = [rest] if rest else []
        self._note(lines)
        return lines

    def _keep(self, chunk: bytes) -> None:
        head = chunk[: max(0, HEAD_BYTES - self._written)]
        self._written += len(head)
        if self._file is not None and head:
            try:
                self._file.write(head)
                self._file.flush()
            except OSError:  # a log is not worth a measurement
                self._file = None
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def close(self) -> None:
        """Writes the end of what was printed, and how much before it is left out."""
        if self._file is None:
            return
        with contextlib.suppress(OSError), self._file:
            more = self.count_bytes - self._written
            if more > 0:
                tail = b"".join(self._tail)[-min(more, TAIL_BYTES) :]
                if more > len(tail):
                    self._file.write(b"\n... %d bytes are left out here ...\n" % (more - len(tail)))
                self._file.write(tail)
        self._file = None

    def tail(self, lines: int = 30) -> str:
        """The last lines."""
        text = b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace")
        return "\n".join(text.replace("\r", "\n").splitlines()[-lines:])

    # -- what it says of a failure ----------------------------------------------------------------------------

    def _note(self, lines: list[bytes]) -> None:
        """Keeps lines that look like an error: of many the first and the newest ones."""
        for line in lines:
            if b"rror" in line or b"xception" in line or b"emory" in line or b"ERROR" in line or b"Interrupt" in line:
                text = line[:2000].decode(errors="replace")
                if complaint_in(text):
                    self._complaints.append(text)
                    if len(self._complaints) > MAX_COMPLAINTS:
                        del self._complaints[MAX_COMPLAINTS // 2]

    def failure(self) -> tuple[FailureKind, str]:
        """The kind that the output tells and the line that tells it: the cause of the others, of equal ones the first.

        Where no line is an error it is the last one, of kind CRASH.
        """
        found = [(kind_of_text(line), complaint_in(line)) for line in self._complaints]
        if not found:
            last = next((line.strip() for line in reversed(self.tail().splitlines()) if line.strip()), "")
            return kind_of_text(self.tail()), _short(last)
        kind, line = min(found, key=lambda each: precedence(each[0]))
        return kind, _short(line)


_LABEL = re.compile(r"^\s*(?:\[[^\]]{1,60}\]:?\s*|\d{1,6}:\s+|\S+\s*\|\s*)*")
_COMPLAINT = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*|$)|.*\bout of memory\b.*|.*\berror:\s.*"
    r"|.*\bERROR\b.*|.*CUDA error.*|.*NCCL error.*",
)
# What launchers print of an error that a rank has told already, and what is no failure.
_HEARSAY = re.compile(
    r"ChildFailedError|SignalException|elastic|error_file|sigterm|failed \(exitcode|ProcessRaisedException"
    r"|ignored exception|errors?=|no error", re.IGNORECASE
)  # fmt: skip
_SHOWN = 400


def complaint_in(line: str) -> str:
    """The error that a line tells, without labels before it; empty for another line."""
    text = _LABEL.sub("", line, count=1).strip()
    return text if _COMPLAINT.match(text) and not _HEARSAY.search(text) else ""


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
