"""What starts a training: torchrun and its relatives, srun and the #SBATCH lines above it, and plain Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.errors import InputError
from autotune.frameworks.reading import Given, Launch
from autotune.frameworks.shell import Command, Script, read_script
from autotune.frameworks.table import Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The training of a launch script.

    Args:
        words: those after the program's name.
        line: of the command.
        devices: of the whole run, None where nothing states them.
        gpus_per_node: likewise.
        environment: the variables that are set for it.
        notes: what was left out or taken for granted while the script was worked out.
    """

    words: Sequence[str]
    line: int
    devices: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_NODES = ("nnodes", "num_nodes", "nodes", "num_machines")
_GPUS = ("nproc_per_node", "num_gpus", "ntasks_per_node", "gpus_per_node", "gres", "gpus_per_task")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus"}


def started(launch: Launch, given: Given, program: re.Pattern[str]) -> Started:
    """The command of a script that runs the training.

    Args:
        launch: a script, a command line, or options alone.
        given: variables of the script's environment.
        program: what the training program is called.

    Raises:
        InputError: no command of the script does that, or it is no script.
    """
    script = read_script(launch.file, launch.text, given.variables)
    runs = [(each, at) for each in script.commands if (at := _program(each, program)) is not None]
    if not runs:
        options = [each for each in script.commands if any(word.startswith("--") for word in each.words)]
        if not options:
            allowed = "a script or command that starts the training, or its options, is needed"
            raise InputError(launch.file, launch.text.strip()[:60] or None, allowed)
        runs = [(max(options, key=lambda each: len(each.words)), -1)]
        if not runs[0][0].words[0].startswith("-"):
            runs = [(runs[0][0], 0)]
    command, at = max(runs, key=lambda run: len(run[0].words) - run[1])
    if at > 0 and command.words[at] == "-m":
        at += 1
    launcher = _options(_before(script, command, at))
    nodes, gpus = _first(launcher, _NODES), _first(launcher, _GPUS)
    devices = None
    if nodes is not None and gpus is not None:
        devices = nodes * gpus
    elif "ntasks" in launcher and launcher["ntasks"].isdigit():
        devices = int(launcher["ntasks"])
    elif "nproc_per_node" in launcher and nodes is None and "nnodes" not in launcher and gpus is not None:
        devices = gpus  # torchrun's default is one node
    return Started(
        words=command.words[at + 1 :], line=command.line, devices=devices, gpus_per_node=gpus,
        environment={**script.environment, **command.environment}, notes=tuple(script.notes),
    )  # fmt: skip


def _program(command: Command, program: re.Pattern[str]) -> int | None:
    """Where in the command the training program stands."""
    for at, word in enumerate(command.words):
        if program.fullmatch(word) is not None:
            return at
    return None


def _before(script: Script, command: Command, at: int) -> list[str]:
    """The launcher's words: those before the program, of an `srun` around it, and of the #SBATCH lines."""
    around = [
        word for each in script.commands if each.line == command.line and each is not command for word in each.words
    ]
    batch = [f"{name}={value}" for name, value in script.directives.items()]
    return [*batch, *around, *command.words[: max(at, 0)]]


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options by name, with underscores; later ones count."""
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        name, sign, value = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-").replace("-", "_")) if word.startswith("-") else ""
        if name:
            found[name] = value if sign else (words[at + 1] if at + 1 < len(words) else "")
    return found


def _first(options: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        digits = re.search(r"(?:^|:)(\d{1,6})(?::\d{1,6})?$", options.get(name, ""))
        if digits is not None and int(digits[1]) > 0:
            return int(digits[1])
    return None


def arguments(
    words: Sequence[str], where: str, switches: frozenset[str] = frozenset()
) -> tuple[dict[str, Said], list[str]]:
    """The options of a program that argparse reads, by name with underscores, and variables that nothing sets.

    Args:
        words: the program's.
        where: their place.
        switches: options that take no value, so that a word after one is none of its.
    """
    found: dict[str, Said] = {}
    unset: list[str] = []
    name: str | None = None
    values: list[str] = []

    def close() -> None:
        if name is not None:
            value: object = True if not values else values[0] if len(values) == 1 else list(values)
            found[name] = Said(value, where)

    for word in words:
        if word.startswith("--") and len(word) > 2:
            close()
            text, sign, value = word[2:].partition("=")
            name, values = text.replace("-", "_"), [value] if sign else []
        elif word.startswith("$") and (name is None or values or name in switches):
            unset.append(word)
        elif name is not None and name not in switches:
            values.append(word)
    close()
    return found, unset
