"""One table per framework that serves both directions: from a plan to its settings, and from settings to the plan.

A fact is a field of ModelSpec, Workload or Plan by its name, as plain data: no two of them share one. A setting is
what the framework calls it: an argument's name, or the dotted place in its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.errors import InputError

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """What a file sets something to, and where (a line, or nothing where the name is place enough)."""

    value: object
    where: str = ""


class Settings:
    """What a file sets, by the framework's names. Remembers what of it was asked for."""

    def __init__(self, file: str, said: Mapping[str, Said]) -> None:
        self.file, self.said = file, dict(said)
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.said

    def value(self, name: str, default: Any = None) -> Any:
        """As the file has it; `default` where the file says nothing, or null."""
        self._asked.add(name)
        said = self.said.get(name)
        return default if said is None or said.value is None else said.value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A whole number. Raises InputError for anything else."""
        value = self.value(name, default)
        if value is None:
            return None
        number = _number(value)
        if number is None or number != int(number) or number < least:
            raise self.bad(name, f"a whole number, at least {least}")
        return int(number)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number. Raises InputError for anything else."""
        value = self.value(name, default)
        number = None if value is None else _number(value)
        if value is not None and number is None:
            raise self.bad(name, "a number")
        return number

    def switch(self, name: str, default: bool = False) -> bool:
        """On or off. Raises InputError for anything else."""
        value = self.value(name, default)
        known = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in known:
            return known[str(value).lower()]
        raise self.bad(name, "true or false")

    def word(self, name: str, default: str | None = None, known: Collection[str] | None = None) -> str | None:
        """A word, of those that are known. Raises InputError for another one."""
        value = self.value(name, default)
        if value is None:
            return None
        if not isinstance(value, str | int | float) or (known is not None and str(value) not in known):
            raise self.bad(name, "one of " + ", ".join(known) if known else "a word")
        return str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words, or one; () where there is none. Raises InputError for anything else."""
        value = self.value(name, ())
        items = list(value) if isinstance(value, list | tuple) else str(value).split()
        if not all(isinstance(item, str | int | float) for item in items):
            raise self.bad(name, "a list of words")
        return tuple(map(str, items))

    def bad(self, name: str, allowed: str) -> InputError:
        """The error of a value that cannot be used, with its place."""
        said = self.said.get(name)
        where = f"{self.file}{f', {said.where}' if said and said.where else ''}: {name}"
        if said and "$" in str(said.value):
            allowed = f"{allowed}; the file does not set this variable: give --set NAME=VALUE"
        return InputError(where, said.value if said else None, allowed)

    def where(self, name: str) -> str:
        """Where the file says it, "" where nowhere in particular."""
        return self.said[name].where if name in self.said else ""

    def left(self) -> Iterator[tuple[str, Said]]:
        """What nobody asked for."""
        return ((name, said) for name, said in self.said.items() if name not in self._asked)


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(str(value).replace("_", ""))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Entry:
    """What one or more settings say of one or more facts.

    Args:
        say: the settings for these facts; the values are as the framework writes them, None leaves one out.
        read: the facts of these settings and of the facts before; what it asks for counts as understood.
        since: the first version that has these settings, "" for every one.
        until: the first version that has them no more.
    """

    say: Callable[[Facts], Mapping[str, object]]
    read: Callable[[Settings, Facts], Mapping[str, object]]
    since: str = ""
    until: str = ""

    def holds(self, version: str) -> bool:
        """Whether that version of the framework has these settings."""
        number = release(version)
        return release(self.since) <= number and (not self.until or number < release(self.until))


def release(version: str) -> tuple[int, ...]:
    """A version as numbers, for comparison: (0, 16) of "0.16"."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def count(name: str, fact: str, default: int | None = None, *, quiet: bool = False, **versions: str) -> Entry:
    """A whole number that both sides have. `quiet` leaves the framework's default unsaid."""
    return Entry(
        say=lambda facts: {} if quiet and facts[fact] == default else {name: facts[fact]},
        read=lambda settings, _: _known({fact: settings.count(name, default)}),
        **versions,
    )


def switch(name: str, fact: str, *, default: bool = False, **versions: str) -> Entry:
    """On or off on both sides; a bare flag where the framework has those."""
    return Entry(
        say=lambda facts: {name: bool(facts[fact])},
        read=lambda settings, _: {fact: settings.switch(name, default)},
        **versions,
    )


def choice(name: str, fact: str, words: Mapping[str, str], default: str | None = None, **versions: str) -> Entry:
    """One of a few words: `words` has theirs by ours, `default` is theirs."""
    ours: dict[str, str] = {}
    for each, theirs in words.items():
        ours.setdefault(theirs, each)

    def read(settings: Settings, _: Facts) -> Mapping[str, object]:
        found = settings.word(name, default, known=tuple(ours))
        return {} if found is None else {fact: ours[found]}

    def say(facts: Facts) -> Mapping[str, object]:
        return {name: None if facts[fact] is None else words[str(facts[fact])]}

    return Entry(say=say, read=read, **versions)


def says(**settings: object) -> Entry:
    """Settings that every export has and no import looks at the value of."""

    def read(found: Settings, _: Facts) -> Mapping[str, object]:
        for name in settings:
            found.value(name)
        return {}

    return Entry(say=lambda facts: settings, read=read)


def _known(facts: Mapping[str, object]) -> Mapping[str, object]:
    return {name: value for name, value in facts.items() if value is not None}


class Why(StrEnum):
    """Why an import leaves a setting aside."""

    NO_WORD = "no word"  # it changes speed or memory, and no plan or workload says so
    UNKNOWN = "unknown"  # nobody here knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """A setting that an import could not say: its name, value, place, and what is known of it."""

    name: str
    value: str
    where: str
    why: Why
    what: str = ""


OFF = frozenset({"", "none", "null", "false", "0", "0.0", "[]", "()"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A framework's settings.

    Args:
        entries: in the order in which they are read.
        no_word: settings that change speed or memory and that no plan says, with what they do; each counts where its
            value is on. In a name, `*` stands for anything.
        elsewhere: settings that are no matter of a plan (data, logs, learning rates), as regular expressions.
    """

    entries: tuple[Entry, ...]
    no_word: Mapping[str, str] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    def say(self, facts: Facts, version: str) -> dict[str, object]:
        """The settings of these facts in that version."""
        found: dict[str, object] = {}
        for entry in self.entries:
            if entry.holds(version):
                found.update(entry.say(facts))
        return found

    def read(self, settings: Settings, known: Facts) -> tuple[dict[str, Any], tuple[Remainder, ...]]:
        """The facts of these settings beside the known ones, and what is left of the settings.

        All versions' spellings are read. Raises InputError for a value that cannot be.
        """
        facts = dict(known)
        for entry in self.entries:
            facts.update(entry.read(settings, facts))
        patterns = {name: re.compile(re.escape(name).replace(r"\*", ".*")) for name in self.no_word}
        elsewhere = re.compile("|".join(self.elsewhere) or "(?!)")
        left = []
        for name, said in settings.left():
            text = _text(said.value)
            said_off = text.lower() in OFF
            pattern = next((each for each, pattern in patterns.items() if pattern.fullmatch(name)), None)
            if pattern is not None and not said_off:
                what = self.no_word[pattern]
                left.append(Remainder(name=name, value=text, where=said.where, why=Why.NO_WORD, what=what))
            elif pattern is None and elsewhere.fullmatch(name) is None:
                left.append(Remainder(name=name, value=text, where=said.where, why=Why.UNKNOWN))
        return facts, tuple(left)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_text(item) for item in value)
    return str(value)
