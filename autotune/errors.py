"""Every exception that a user can meet, and Presence, by which what is away is told once.

    AutotuneError                 anything we raise on purpose; the CLI prints it and exits with `exit_code`
    ├── InputError                a value the user gave cannot be used: what, which value, what is allowed
    │   ├── UnknownNameError      a preset, GPU, model, cluster, tuning or key that nobody knows
    │   ├── UnsupportedModelError a Hugging Face config with something that we do not understand
    │   ├── IllegalPlanError      a plan that cannot be run; carries the reason
    │   └── NothingFitsError      no legal plan is estimated to fit; carries the nearest misses
    ├── MissingMeasurementError   an estimate needs a number that is neither measured nor in the catalog
    ├── StoreError                the database cannot be used
    │   ├── StoreAwayError        ... because its server does not answer
    │   ├── StoreReadOnlyError    ... because it cannot be written
    │   ├── StoreNewerError       ... because a newer release wrote its schema
    │   ├── StoreOlderError       ... because its schema is of before the first release
    │   └── StoreConflictError    ... because somebody else changed or owns the row
    ├── ProberError               the measuring side cannot work at all (no torch, no device)
    └── ServerError               the API that --server names cannot be reached, or fails
        └── AccessError           ... because it refuses the key: trying again does not help

A probe that fails is not an exception: it is a `Failure` record (autotune.specs.measurement), because a
failed trial is an ordinary result of a tuning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

_SHOWN = 120


def printable(text: str) -> str:
    """The text as a terminal may show it: what would move the cursor or hide letters is written as an escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _short(text: str) -> str:
    """What a message repeats of a text from outside: its two ends if it is long, nothing that a terminal obeys."""
    text = printable(text)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}...{text[-_SHOWN:]}"


_RUN = re.compile(r"[^\s'\"]+")
_SCHEME = re.compile(r"[\w+.-]+://")
_SECRET = re.compile(r":(?!/|\*\*\*@)")
_PASSWORD = re.compile(r"(password=)[^&\s'\"]*", re.IGNORECASE)


def masked(text: str) -> str:
    """A text without what may be user names and passwords in URLs, however these are mistyped.

    In time linear in the text, which may be anybody's.
    """
    text = _PASSWORD.sub(r"\1***", text)
    return _RUN.sub(_without_credentials, text) if "@" in text else text


def _without_credentials(run: re.Match[str]) -> str:
    """A run without spaces and quotes, less what stands between a scheme and the last @ if there is a colon in it."""
    text = run[0]
    scheme, at = _SCHEME.match(text), text.rfind("@")
    start = scheme.end() if scheme else 0
    is_secret = _SECRET.search(text, start, at + 1) is not None
    return f"{text[:start]}***{text[at:]}" if is_secret else text


class AutotuneError(Exception):
    """Base of all errors raised on purpose. `exit_code` is the CLI's exit status."""

    exit_code = 1


class InputError(AutotuneError):
    """A value from outside cannot be used.

    Args:
        what: the name of the thing as the user knows it (`--seq-len`, `plan.tp`, a file's path).
        value: the offending value; None where there is none.
        allowed: what would be accepted, in words.
    """

    exit_code = 2

    def __init__(self, what: str, value: object, allowed: str) -> None:
        self.what, self.value, self.allowed = what, value, allowed
        found = "none given" if value is None else f"{_short(masked(repr(value)))} cannot be used"
        super().__init__(f"{_short(what)}: {found}; {printable(allowed)}")


class UnknownNameError(InputError):
    """A name that nobody knows; lists close or all known names."""

    def __init__(self, what: str, value: str, known: Iterable[str]) -> None:
        super().__init__(what, value, "known: " + (", ".join(sorted(set(known))) or "none yet"))


class UnsupportedModelError(InputError):
    """A model description with a part that we do not understand, named."""


class IllegalPlanError(InputError):
    """A plan that cannot be run on this model, cluster and workload."""


class NothingFitsError(AutotuneError):
    """No legal plan is estimated to fit in memory.

    Args:
        message: one line for people.
        misses: the nearest misses, each a dict with `plan`, `needs_bytes`, `has_bytes`, `would_fit_if`.
    """

    exit_code = 3

    def __init__(self, message: str, misses: list[dict[str, object]]) -> None:
        super().__init__(message)
        self.misses = misses


class MissingMeasurementError(AutotuneError):
    """A figure is neither measured nor in the catalog, and we do not guess."""

    exit_code = 4


class StoreError(AutotuneError):
    """The database cannot be used."""

    exit_code = 5


class StoreAwayError(StoreError):
    """The database's server does not answer. The store has logged that, once: whoever goes on anyway need not."""


class StoreReadOnlyError(StoreError):
    """The database cannot be written."""


class StoreNewerError(StoreError):
    """The database's schema was written by a newer release."""


class StoreOlderError(StoreError):
    """The database's schema is older than any release's."""


class StoreConflictError(StoreError):
    """Another process owns or changed this row."""


class ProberError(AutotuneError):
    """The measuring side cannot work at all."""

    exit_code = 6


class ServerError(AutotuneError):
    """The API cannot be reached, refuses the key, or fails."""

    exit_code = 7


class AccessError(ServerError):
    """The API refuses the key, or what its role may do."""


class Presence:
    """Whether a server is there, which goes to the log when it changes: one line each, however many calls fail.

    Args:
        what: the server, in words.
        log: where to.
        is_there: whether it is expected to be; None where its absence at the start is told by whoever starts.
    """

    def __init__(self, what: str, log: logging.Logger, *, is_there: bool | None = True) -> None:
        self._what, self._log, self.is_there = what, log, is_there

    def away(self, reason: object) -> None:
        """It did not answer."""
        before, self.is_there = self.is_there, False
        if before:
            self._log.warning("%s is away: %s", self._what, reason)

    def back(self) -> None:
        """It answered."""
        before, self.is_there = self.is_there, True
        if before is False:
            self._log.warning("%s is back", self._what)
