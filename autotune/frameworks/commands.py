"""The command of a launch: what starts the ranks, how many, and the options of the script that they run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.errors import InputError
from autotune.frameworks.reading import Launch
from autotune.frameworks.table import Said

_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "python", "python3")
_NODES = ("nnodes", "num_nodes", "num_machines")
_GPUS = ("nproc_per_node", "num_gpus")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r'"\$\{([A-Za-z_]\w*)\[@\]\}"')
_NAMED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[@\])?(?::-([^}]*))?\}?")


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
            InputError: quotes that do not close, several such commands, or a number of ranks that is none.
        """
        known = dict(variables or {})
        found = []
        for words in _commands(launch, known):
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
        for words in _commands(launch, dict(variables or {})):
            at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
            if at is not None and any(word.partition("=")[0] == f"--{option}" for word in words):
                return cls.of(launch, words[at].rpartition("/")[2], variables)
        return cls()

    def count(self, launch: Launch, *names: str) -> int | None:
        """A positive whole number that one of these options gives; None without any. Raises InputError."""
        return _count(launch, {name: said.value for name, said in self.options.items()}, names)


def _commands(launch: Launch, known: dict[str, str]) -> Iterator[list[str]]:
    """Each command of a script as words, with the variables that it sets put in."""
    for line in launch.text.replace("\\\n", " ").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        assigned = _ASSIGNED.fullmatch(text)
        if assigned and not re.match(r"\S*=\S*\s+\S", text.replace("export ", "", 1)):
            known.setdefault(assigned[1], assigned[2].strip().removeprefix("(").removesuffix(")").strip("'\""))
            continue
        if not any(name in text for name in _LAUNCHERS):
            continue
        text = _ARRAY.sub(lambda match: known.get(match[1], match[0]), text)
        text = _NAMED.sub(lambda match: known.get(match[1], match[2] if match[2] is not None else match[0]), text)
        try:
            yield shlex.split(text, comments=True)
        except ValueError as error:
            raise InputError(launch.file, line[:80], f"quotes are needed in pairs ({error})") from None


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
