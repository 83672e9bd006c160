"""Command: a training program of the user's own as a trial runs it: its arguments, what it can run, how its speed is
read. It comes from a file (docs/own-program.md), never from a request, which only names one.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from autotune.errors import InputError, UnknownNameError
from autotune.specs.base import Spec, mismatch
from autotune.specs.documents import read_document, read_text
from autotune.specs.model import ModelSpec
from autotune.specs.tuning import Space
from autotune.specs.workload import DType, FrameworkName, Workload

PLACEHOLDERS = {
    "tp": "tensor parallel ranks", "pp": "pipeline stages", "dp": "data parallel replicas",
    "cp": "context parallel ranks", "ep": "expert parallel ranks", "etp": "ranks that an expert is divided over",
    "vpp": "model chunks of a pipeline rank", "micro_batch": "sequences of a micro-batch on a replica",
    "zero_stage": "0 to 3", "recompute": "none, selective, full or op", "sequence_parallel": "true or false",
    "schedule": "gpipe, 1f1b or interleaved", "recompute_modules": "modules of selective recomputation, joined by ,",
    "accumulation": "micro-batches of a step and replica", "replica_batch": "sequences of a step and replica",
    "global_batch": "sequences of a step", "seq_len": "tokens of a sequence", "dtype": "fp32, bf16, fp16 or fp8",
    "layers": "of the model", "hidden": "of the model", "heads": "of the model", "kv_heads": "of the model",
    "head_dim": "of the model", "ffn": "of the model", "vocab": "of the model",
    "chunk_layers": "layers of a model chunk: layers / (pp * vpp), rounded up",
    "world_size": "ranks in all", "nproc": "ranks of a node", "nnodes": "nodes",
    "node_rank": "this node's number, from 0", "master_addr": "address of the first node",
    "master_port": "a port that was free there", "work_dir": "an empty directory, removed after the trial",
    "template_dir": "the directory of the command's file", "steps": "steps that are looked at, at most",
}  # fmt: skip
"""What {NAME} may stand for. None of it is free text from a request: numbers, words of closed sets, and our own."""

BY_AXIS = {
    "tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "ep": ("ep",), "vpp": ("vpp", "chunk_layers"),
    "micro_batch": ("micro_batch", "accumulation"), "zero_stage": ("zero_stage",), "recompute": ("recompute",),
    "sequence_parallel": ("sequence_parallel",), "schedule": ("schedule",), "recompute_modules": ("recompute_modules",),
}  # fmt: skip
"""By each axis of the plan space what tells the program about it."""

_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OWN = re.compile(r"[a-z][a-z0-9_]*")
SUFFIXES = (".yaml", ".yml", ".json")
MAX_ROUNDS = 8
"""Values that name values: deeper than this they go round in a circle."""

Scalar = int | str | bool
Condition = dict[str, tuple[Scalar, ...]]
Values = tuple[Scalar, ...] | Literal["any"]


class Launcher(StrEnum):
    """What starts the program on every node: nothing but its own words, or torchrun."""

    GIVEN = "given"
    TORCHRUN = "torchrun"


class SpeedFrom(StrEnum):
    """Where a program tells how fast it is: our callback, a framework's own log, a pattern of one of its lines, or a
    file with a JSON object a line."""

    CALLBACK = "callback"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    NANOTRON = "nanotron"
    PATTERN = "pattern"
    JSON_LINES = "json-lines"


class Unit(StrEnum):
    """What a program's figure of speed is. `arrival`: it prints none, and a line's step took until the line came."""

    S = "s/step"
    MS = "ms/step"
    STEPS = "steps/s"
    SAMPLES = "samples/s"
    TOKENS = "tokens/s"
    TOKENS_PER_GPU = "tokens/s/gpu"
    ARRIVAL = "arrival"


class MemoryUnit(StrEnum):
    """What a program's figure of memory is."""

    B = "B"
    MIB = "MiB"
    GIB = "GiB"
    GB = "GB"

    @property
    def count_bytes(self) -> int:
        """Bytes of one."""
        return {"B": 1, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}[self.value]


class Speed(Spec):
    """How a program's steps are read.

    Args:
        source: where they are told.
        pattern: a regular expression with the groups `speed`, and where they are told `step`, `loss`, `memory`.
        file: of JSON lines.
        keys: by `step`, `speed`, `loss` and `memory` the keys in such a line; `speed` alone is needed.
        unit: of `speed`.
        memory_unit: of `memory`, the peak of a device.
    """

    source: SpeedFrom
    pattern: str = ""
    file: str = ""
    keys: dict[Literal["step", "speed", "loss", "memory"], str] = {}
    unit: Unit | None = None
    memory_unit: MemoryUnit = MemoryUnit.B

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {SpeedFrom.PATTERN: ("pattern",), SpeedFrom.JSON_LINES: ("file", "keys")}.get(self.source, ())
        for name in ("pattern", "file", "keys"):
            if bool(getattr(self, name)) != (name in needed):
                allowed = "it is needed" if name in needed else "it goes with another source only"
                raise mismatch(name, getattr(self, name) or None, f"with source {self.source.value} {allowed}")
        if (self.unit is None) == bool(needed):
            allowed = f"needed with source {self.source.value}" if needed else "this source tells its unit itself"
            raise mismatch("unit", self.unit and self.unit.value, allowed)
        arrives, told = self.unit is Unit.ARRIVAL, {str(name) for name in self.keys}
        if self.pattern:
            told = set(_groups(self.pattern))
        if needed and ("speed" in told) == arrives:
            allowed = "by arrival no speed is read" if arrives else "the group or key `speed` is needed"
            raise mismatch("pattern" if self.pattern else "keys", ", ".join(sorted(told)) or None, allowed)
        return self


def _groups(pattern: str) -> Iterable[str]:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise mismatch("pattern", pattern, f"a regular expression ({error})") from None
    unknown = set(groups) - {"step", "speed", "loss", "memory"}
    if unknown:
        raise mismatch("pattern", unknown.pop(), "groups are called step, speed, loss and memory")
    return groups


class Case(Spec):
    """A value where the plan is so; without `when` whatever it is."""

    when: Condition = {}
    value: str


class Words(Spec):
    """Arguments that are given where the plan is so."""

    when: Condition
    argv: Annotated[tuple[str, ...], Field(min_length=1)]


class Fixed(Spec):
    """What of a workload the program has built in: requests for anything else are refused."""

    seq_len: Annotated[int, Field(ge=1)] | None = None
    global_batch: Annotated[int, Field(ge=1)] | None = None
    dtype: DType | None = None


class CommandTemplate(Spec):
    """A training program with placeholders ({tp}, {micro_batch}, ...). No shell reads any of it.

    Args:
        argv: the program and its arguments, some of them for some plans only.
        environment: added to what ranks get of their node's environment.
        pass_environment: names of further variables that the program may have of its node's environment.
        files: by their name in {work_dir} templates beside this file, in which placeholders are filled in.
        values: further placeholders; the first case that holds.
        plans: which plans the program can run: by axis the values that it takes, or `any` legal one. An axis that is
            absent has the one value that leaves it out (tp 1, zero_stage 0 and so on).
        framework: whose rules of legality and whose habits hold for it.
        model: a file of the model that it trains (ours, or a Hugging Face config.json); none: any.
        workload: what is built in.
        launcher: what starts it.
        directory: where it is started; {work_dir} by default.
        speed: how its steps are read.
        deadline_s: of one trial, from its start to the last step that is needed.
        grace_s: between SIGTERM and SIGKILL.
    """

    argv: Annotated[tuple[str | Words, ...], Field(min_length=1)]
    environment: dict[str, str] = {}
    pass_environment: tuple[str, ...] = ()
    files: dict[str, str] = {}
    values: dict[str, tuple[Case, ...]] = {}
    plans: dict[str, Values] = {}
    framework: FrameworkName = FrameworkName.TORCH
    model: str = ""
    workload: Fixed = Fixed()
    launcher: Launcher = Launcher.GIVEN
    directory: str = ""
    speed: Speed
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    grace_s: Annotated[float, Field(ge=0, le=600)] = 10.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.argv[0], str):
            raise mismatch("argv", None, "the program itself comes first, whatever the plan")
        for name in self.values:
            if name in PLACEHOLDERS or not _OWN.fullmatch(name):
                raise mismatch("values", name, "a new name of small letters, digits and _")
        for name in self.files:
            if Path(name).name != name or name in {"", ".", ".."}:
                raise mismatch("files", name, "the plain name of a file in {work_dir}")
        for name in self.plans:
            if name not in BY_AXIS:
                raise mismatch("plans", name, "one of " + ", ".join(BY_AXIS))
        self.space()
        return self

    def space(self) -> Space:
        """The plans that the program can run."""
        plain: dict[str, Any] = {
            "tp": [1], "pp": [1], "cp": [1], "ep": [1], "vpp": [1], "micro_batch": [1], "zero_stage": [0],
            "recompute": ["none"], "sequence_parallel": [False], "schedule": ["1f1b"],
        }  # fmt: skip
        data: dict[str, Any] = {name: list(v) for name, v in self.plans.items() if v != "any"}
        named = data.pop("recompute_modules", None)
        if named is not None:
            data["recompute_modules"] = [str(item).split("+") for item in named]
        return Space.from_data({name: v for name, v in plain.items() if name not in self.plans} | data, "plans")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text with placeholders that stands in this file, with its place."""
        for word in self.argv:
            yield from (("argv", each) for each in ([word] if isinstance(word, str) else word.argv))
        yield from ((f"environment.{name}", text) for name, text in self.environment.items())
        yield from ((f"values.{name}", case.value) for name, cases in self.values.items() for case in cases)
        yield "directory", self.directory
        yield "speed.file", self.speed.file

    def conditions(self) -> Iterator[Condition]:
        """Every `when`."""
        yield from (word.when for word in self.argv if isinstance(word, Words))
        yield from (case.when for cases in self.values.values() for case in cases)


def names_in(text: str) -> Iterator[str]:
    """The placeholders of a text."""
    return (match[1] for match in _PLACEHOLDER.finditer(text))


def filled(text: str, words: dict[str, str], what: str) -> str:
    """The text with its placeholders filled in. Raises InputError for one that nobody knows."""

    def word(match: re.Match[str]) -> str:
        if match[1] not in words:
            raise InputError(what, match[0], "a placeholder is one of " + ", ".join(sorted(words)))
        return words[match[1]]

    return _PLACEHOLDER.sub(word, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command's file as it was read.

    Args:
        name: the file's, without suffix.
        template: what it says.
        directory: where it lies, with the templates of its files.
        texts: the content of each template, by the name of the file that comes of it.
        digest: of all that.
    """

    name: str
    template: CommandTemplate
    directory: Path
    texts: dict[str, str]
    digest: str

    @property
    def ref(self) -> str:
        """Name and digest: what a workload names. Another content is another command."""
        return f"{self.name}@{self.digest}"

    def offer(self, model: ModelSpec | None) -> CommandOffer:
        """What others have to know of it. `model` is the one that its file names."""
        template = self.template
        return CommandOffer(
            ref=self.ref,
            space=template.space(),
            framework=template.framework,
            workload=template.workload,
            model=model,
        )


class CommandOffer(Spec):
    """What a node tells of a command that it runs: its name and digest, and which requests it can answer."""

    ref: str
    space: Space
    framework: FrameworkName
    workload: Fixed = Fixed()
    model: ModelSpec | None = None

    @property
    def name(self) -> str:
        """What a request names."""
        return self.ref.partition("@")[0]

    def check_model(self, model: ModelSpec) -> None:
        """Raises InputError for another model than the one that is built in."""
        if self.model is not None and self.model.key != model.key:
            raise InputError("model", model.name, f"command {self.name} always trains {self.model.name}")

    def narrowed(self, asked: Space) -> Space:
        """The plans that are asked for and that the program can run. Raises InputError where there are none."""
        own, wanted = self.space.to_data(), asked.to_data()
        both: dict[str, Any] = {}
        for name, mine in own.items():
            theirs = wanted[name]
            both[name] = mine if theirs is None else theirs if mine is None else [v for v in theirs if v in mine]
            if both[name] == []:
                raise InputError(f"space.{name}", theirs, f"command {self.name} can run {_listed(mine)}")
        return Space.from_data(both, "space")

    def workload_of(self, asked: Workload, *, given: Iterable[str] = ()) -> Workload:
        """The workload for this program. Raises InputError where `given` fields differ from what is built in."""
        changes: dict[str, object] = {"framework": self.framework, "command": self.ref}
        for name, mine in self.workload:
            if mine is None:
                continue
            if name in given and getattr(asked, name) != mine:
                raise InputError(name, getattr(asked, name), f"command {self.name} always has {mine}")
            changes[name] = mine
        return asked.model_copy(update=changes)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def read_command(path: Path) -> Command:
    """Reads a command's file and the templates of its files, and checks that nothing in them is unknown.

    Raises:
        InputError: a file that cannot be read or that anybody may write; a key, placeholder or value that cannot be;
            an axis with several values of which the program is told nothing.
    """
    if not _NAME.fullmatch(path.stem) or path.suffix not in SUFFIXES:
        raise InputError("command", str(path), "a file NAME.yaml, NAME of letters, digits, dots, - and _")
    directory = path.resolve().parent
    _require_own(path)
    template = CommandTemplate.from_data(read_document(path), str(path))
    texts = {}
    for name, source in template.files.items():
        if Path(source).is_absolute() or ".." in Path(source).parts:
            raise InputError(f"{path}: files.{name}", source, "a template beside the command's file")
        _require_own(directory / source)
        texts[name] = read_text(directory / source)
    _check_placeholders(path, template, texts)
    content = json.dumps([template.to_data(), texts], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Command(name=path.stem, template=template, directory=directory, texts=texts, digest=digest)


def _require_own(path: Path) -> None:
    """What anybody may write is no word of an operator."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(str(path), reason, "a readable text file is needed") from None
    if mode & stat.S_IWOTH:
        raise InputError(str(path), stat.filemode(mode), "a file that not everybody may write: chmod o-w")


def _check_placeholders(path: Path, template: CommandTemplate, texts: dict[str, str]) -> None:
    known = {*PLACEHOLDERS, *template.values}
    told: set[str] = set()
    for place, text in (*template.texts(), *((f"files.{name}", text) for name, text in texts.items())):
        for name in names_in(text):
            if name not in known:
                allowed = "a placeholder is one of " + ", ".join(sorted(known))
                raise InputError(f"{path}: {place}", "{" + name + "}", allowed)
            told.add(name)
    for condition in template.conditions():
        for name in condition:
            if name not in PLACEHOLDERS:
                raise InputError(f"{path}: when", name, "one of " + ", ".join(PLACEHOLDERS))
            told.add(name)
    for axis, values in template.plans.items():
        implied = axis == "schedule" and set(values) == {"1f1b", "interleaved"} and "vpp" in told
        if (values == "any" or len(values) > 1) and not told & set(BY_AXIS[axis]) and not implied:
            names = " or ".join("{" + name + "}" for name in BY_AXIS[axis])
            raise InputError(f"{path}: plans.{axis}", values, f"the program is not told of it: {names} stands nowhere")
    _check_workload(path, template, told)


def _check_workload(path: Path, template: CommandTemplate, told: set[str]) -> None:
    """What the program trains is either told to it or built in: nothing is taken for granted."""
    tells = {"seq_len": {"seq_len"}, "global_batch": {"global_batch", "accumulation", "replica_batch"},
             "dtype": {"dtype"}}  # fmt: skip
    for name, names in tells.items():
        if getattr(template.workload, name) is None and not told & names:
            allowed = (
                f"say which is built in, or tell the program by {' or '.join('{' + n + '}' for n in sorted(names))}"
            )
            raise InputError(f"{path}: workload.{name}", None, allowed)


class CommandBook:
    """The commands that may be run here: those of a directory that the operator of this node made, and files that the
    user of this process named.

    Args:
        directory: with one file a command; None: none.
        files: further ones.
    """

    def __init__(self, directory: Path | None = None, files: Iterable[Path] = ()) -> None:
        self._directory, self._files = directory, tuple(files)

    def __call__(self, ref: str) -> Command:
        """The command of that name and digest.

        Raises:
            UnknownNameError: none of that name may be run here.
            InputError: it has changed since it was named, or cannot be read.
        """
        name, _, digest = ref.partition("@")
        found = self.named(name)
        if digest and found.digest != digest:
            raise InputError("command", ref, f"it was changed meanwhile: here it is {found.ref}")
        return found

    def named(self, name: str) -> Command:
        """The command of that name. Raises as a call does."""
        paths = {path.stem: path for path in (*self._listed(), *self._files)}
        if name not in paths:
            raise UnknownNameError("command", name, paths)
        return read_command(paths[name])

    def all(self) -> list[Command]:
        """Every command that can be read, by name; what cannot is left out. See `broken`."""
        return [found for path in self._paths() if isinstance(found := _read(path), Command)]

    def broken(self) -> list[InputError]:
        """Why the others cannot."""
        return [found for path in self._paths() if isinstance(found := _read(path), InputError)]

    def _paths(self) -> list[Path]:
        return sorted({*self._listed(), *self._files}, key=lambda path: path.stem)

    def _listed(self) -> list[Path]:
        if self._directory is None:
            return []
        _require_own(self._directory)
        return [path for path in self._directory.iterdir() if path.suffix in SUFFIXES and path.is_file()]


def _read(path: Path) -> Command | InputError:
    try:
        return read_command(path)
    except InputError as error:
        return error
