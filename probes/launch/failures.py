"""What went wrong on a rank: its kind, and which of several is the cause."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, InputError, ProberError
from autotune.specs import FailureKind

# Exceptions are recognised by the names of their classes, so that this needs no torch.
_OOM_CLASSES = frozenset({"OutOfMemoryError", "MemoryError"})
_COMMUNICATION_CLASSES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_OOM_TEXTS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "HIP out of memory",
)
_COMMUNICATION_TEXTS = (
    "gloo/", "Connection closed by peer", "Connection reset by peer",
    "NCCL error", "ncclInternalError", "ncclSystemError", "ncclRemoteError",
)  # fmt: skip

# One cause shows as different failures on different ranks: when one runs out of memory, its peers lose their
# connection or wait for ever. The first of these that any rank shows is the cause.
_PRECEDENCE = (
    FailureKind.UNAVAILABLE,
    FailureKind.OOM,
    FailureKind.ILLEGAL,
    FailureKind.CANCELLED,
    FailureKind.LOST,
    FailureKind.CRASH,
    FailureKind.COMMUNICATION,
    FailureKind.HANG,
    FailureKind.SLOW,
)
_TAIL_LINES = 30
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The failure of one rank, or of the launch itself where `rank` is None; `stopped` says that it hung by SIGSTOP."""

    rank: int | None
    kind: FailureKind
    message: str
    stopped: bool = False


def cause_of(error: BaseException) -> BaseException:
    """The exception to judge in a chain of them, because libraries wrap what went wrong in errors of their own.

    The earliest whose kind is known; if there is none, the end of the explicit (`raise ... from`) chain.
    """
    chain = [error]
    while (deeper := _before(chain[-1])) is not None:
        chain.append(deeper)
    known = [link for link in chain if kind_of(link) is not FailureKind.CRASH]
    while not known and error.__cause__ is not None:
        error = error.__cause__
    return known[-1] if known else error


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def kind_of(error: BaseException) -> FailureKind:
    """The kind of one exception raised on a rank."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _OOM_CLASSES:
        return FailureKind.OOM
    if isinstance(error, InputError):
        return FailureKind.ILLEGAL
    if isinstance(error, ProberError):
        return FailureKind.UNAVAILABLE
    found = kind_of_text(str(error))
    if found is FailureKind.CRASH and names & _COMMUNICATION_CLASSES:
        return FailureKind.COMMUNICATION
    return found


def kind_of_text(text: str) -> FailureKind:
    """The kind that an error message or the log of a dead rank tells; CRASH where it tells nothing."""
    if any(mark in text for mark in _OOM_TEXTS):
        return FailureKind.OOM
    if any(mark in text for mark in _COMMUNICATION_TEXTS):
        return FailureKind.COMMUNICATION
    return FailureKind.CRASH


def message_of(error: BaseException) -> str:
    """The exception's class and the last line of its message that says something; our own messages as they are.

    Bytes of a path that are no text come as escapes: no database and no JSON could hold them.
    """
    text = str(error).encode(errors="backslashreplace").decode()
    if isinstance(error, AutotuneError):
        return text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[-1]}" if lines else name


def death_of(status: int) -> str:
    """A process's return code (as subprocess gives it) in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def first_cause(failures: Iterable[RankFailure]) -> RankFailure | None:
    """The failure that explains the others; of equal ones the earliest."""
    return min(failures, key=lambda failure: precedence(failure.kind), default=None)


def precedence(kind: FailureKind) -> int:
    """The place of a kind among those that may be the cause; the cause has the lowest."""
    return _PRECEDENCE.index(kind)


def tail_of(path: Path) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
