"""The command of a launch: what starts the ranks, how many, and the options of the script that they run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.errors import InputError
from autotune.frameworks.reading import Launch
from autotune.frameworks.shell import read_script
from autotune.frameworks.table import Said

_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "python", "python3")
_NODES = ("nnodes", "num_nodes", "num_machines")
_GPUS = ("nproc_per_node", "num_gpus")
_STARTS = re.compile(rf"^\s*(?:\w+=\S*\s+)*(?:{'|'.join(_LAUNCHERS)})\s+[^\s=:]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """One node's command.

    Attributes:
        argv: its words; () where the text is no command.
        options: of the script, by their names without dashes, underscores for inner ones as they stand.
        positional: words of the script that are no options.
        nodes: that the launcher is told.
        gpus_per_node: ranks of a node that the launcher is told.
        processes: ranks of the whole run that the launcher is told (accelerate).
    """

    argv: tuple[str, ...] = ()
    options: Mapping[str, Said] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    nodes: int | None = None
    gpus_per_node: int | None = None
    processes: int | None = None

    @property
    def devices(self) -> int | None:
        """Of the whole run, where the launcher is told."""
        if self.processes is not None:
            return self.processes
        return None if self.gpus_per_node is None else (self.nodes or 1) * self.gpus_per_node

    @classmethod
    def of(cls, launch: Launch, script: str, variables: Mapping[str, str] | None = None) -> Command:
        """The command of a text that runs `script`; an empty one where the text does not.

        Raises:
            InputError: it is not bash, several such commands, or a number of ranks that is none.
        """
        found = []
        for words in _commands(launch, variables or {}):
            at = next((at for at, word in enumerate(words) if re.search(rf"(^|/){re.escape(script)}$", word)), None)
            if at is not None and any(word.rpartition("/")[2] in _LAUNCHERS for word in words[:at]):
                found.append((words, at))
        if not found:
            return cls()
        if len(found) > 1:
            raise InputError(launch.file, script, f"{len(found)} commands run it: give one of them")
        words, at = found[0]
        launcher = {name.replace("-", "_"): said.value for name, said in _options(words[:at])[0].items()}
        options, positional = _options(words[at + 1 :])
        return cls(
            argv=tuple(words), options=options, positional=positional, nodes=_count(launch, launcher, _NODES),
            gpus_per_node=_count(launch, launcher, _GPUS), processes=_count(launch, launcher, ("num_processes",)),
        )  # fmt: skip

    @classmethod
    def of_config(cls, launch: Launch, option: str, variables: Mapping[str, str] | None = None) -> Command:
        """The command of a text that has this option, whatever its script is called; empty where none has."""
        for words in _commands(launch, variables or {}):
            at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
            if at is not None and any(word.partition("=")[0] == f"--{option}" for word in words):
                return cls.of(launch, words[at].rpartition("/")[2], variables)
        return cls()

    def count(self, launch: Launch, *names: str) -> int | None:
        """A positive whole number that one of these options gives; None without any. Raises InputError."""
        return _count(launch, {name: said.value for name, said in self.options.items()}, names)


def _commands(launch: Launch, variables: Mapping[str, str]) -> Iterator[list[str]]:
    """Each command of a script as words; none where the text is a config."""
    if launch.text.startswith("#!") or _STARTS.search(launch.text):
        yield from (list(each.words) for each in read_script(launch.file, launch.text, variables).commands)


def _options(words: list[str]) -> tuple[dict[str, Said], tuple[str, ...]]:
    found: dict[str, Said] = {}
    positional = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            positional.append(word)
            continue
        name, sign, value = word.removeprefix("--").partition("=")
        if not sign and at < len(words) and not words[at].startswith("--"):
            value, sign = words[at], "="
            at += 1
        found[name] = Said(value if sign else True)
    return found, tuple(positional)


def _count(launch: Launch, options: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = options.get(name)
        if isinstance(value, str) and not value.startswith("$"):
            if not value.isdigit() or int(value) < 1:
                raise InputError(f"{launch.file}: --{name}", value, "a positive whole number")
            return int(value)
    return None
