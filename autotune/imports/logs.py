"""What every reader of a log works with: the file's lines, and the record of what a training log states."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.errors import InputError

MIB, GIB = 2**20, 2**30

MAX_DIGITS = 18
LEAST = 1e-12
"""No time, speed or memory in a log is smaller than this, in any unit; smaller ones may lead to infinity."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What launchers put before each line of a rank: torchrun --tee, srun --label (padded to the highest task's width),
# Open MPI 4 and 5 --tag-output, Ray and SkyPilot, kubectl logs --timestamps and --prefix, docker compose, accelerate.
_LABEL = re.compile(
    r"""^(?:
      \[(?:default|rank|local_rank)?\d+\]:
    | \ *\d+:\ (?!\d)
    | \[[\w.-]*@?\d+,\d+\]<std(?:out|err)>:
    | \([^()]*\b(?:pid|rank)=\d+[^()]*\)\ ?
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)\ ?
    | \[pod/[^\]]*\]\ ?
    | [\w.-]+-\d+\ +\|\ ?
    | std(?:out|err):
    )\ ?""",
    re.VERBOSE,
)
# pdsh and mpirun of some sites put the host: taken off only where nearly every line has one of a few such words.
_HOST = re.compile(r"^([A-Za-z][\w.-]*|\d+(?:\.\d+){3}): ")
LABELLED = 0.9
"""Share of the lines that has a host before it, where hosts are labels."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|NPU|XPU)(?: error)?: out of memory|(?:CUDA|HIP|NPU|XPU) out of memory"
    r"|(?:cuda|hip) failure \d* ?'?out of memory|(?:CUBLAS|CUDNN|CUSOLVER|HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: Out of memory",
    re.IGNORECASE,
)

Value = int | float | str | bool


@dataclass(frozen=True, slots=True)
class LogFile:
    """A text file under its name. Lines count from 1 and come without colours and rank labels.

    Args:
        name: as the user gave it.
        lines: the complete lines.
        cut: the number of the last line if it has no line end: half of it may be missing.
    """

    name: str
    lines: tuple[str, ...]
    cut: int | None = None

    @classmethod
    def of(cls, name: str, text: str) -> LogFile:
        """Splits a text. Raises InputError for an empty one, or one that is no text."""
        if not text.strip():
            raise InputError(name, "", "a log with at least one complete line is needed")
        if "\0" in text:
            raise InputError(name, "NUL", "a text file is needed")
        lines = text.replace("\r\n", "\n").split("\n")
        cut = len(lines) if lines[-1].strip() else None
        return cls(name, _without_hosts([_unlabelled(_COLOUR.sub("", line)) for line in lines[:-1]]), cut)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return enumerate(self.lines, start=1)

    def where(self, line: int) -> str:
        """A place in the file, for people."""
        return f"{self.name}, line {line}"

    def bad(self, line: int, what: str, value: object, allowed: str) -> InputError:
        """The error for a value in a line."""
        return InputError(f"{self.where(line)}, {what}", value, allowed)

    def positive(self, line: int, what: str, text: str) -> float:
        """A finite number above zero; commas between thousands are fine. Raises InputError."""
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise self.bad(line, what, text, "must be a number") from None
        if not math.isfinite(value) or value < LEAST:
            raise self.bad(line, what, text, "must be a finite number above 0")
        return value

    def count(self, line: int, what: str, text: str) -> int:
        """A whole number of at least 1. Raises InputError."""
        value = self.positive(line, what, text)
        if value != int(value):
            raise self.bad(line, what, text, "must be a whole number")
        return int(value)

    def step(self, line: int, text: str) -> int:
        """The number of a step. Raises InputError for one that no run can come to."""
        if len(text) > MAX_DIGITS:
            raise self.bad(line, "step", text, f"must be a number of at most {MAX_DIGITS} digits")
        return int(text)

    def out_of_memory(self) -> int | None:
        """The first line that tells that a device's memory ran out; None if there is none."""
        return next((number for number, text in self if _OUT_OF_MEMORY.search(text)), None)


def _unlabelled(line: str) -> str:
    """The line without the labels before it; two launchers in a row put two."""
    for _ in range(3):
        rest = _LABEL.sub("", line)
        if rest == line:
            break
        line = rest
    return line


def _without_hosts(lines: list[str]) -> tuple[str, ...]:
    found = [match[1] for line in lines if line.strip() and (match := _HOST.match(line))]
    written = sum(1 for line in lines if line.strip())
    if len(found) < max(LABELLED * written, 2) or len(set(found)) > len(found) / 2:
        return tuple(lines)
    return tuple(_unlabelled(_HOST.sub("", line)) for line in lines)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a log states in a line. `implied` is not written there but a default of the framework."""

    value: Value
    line: int
    implied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What one line has of a step (over a logging interval: the mean): its time or a speed, one of the three."""

    line: int
    number: int
    time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None


@dataclass(slots=True, kw_only=True)
class TrainingLog:
    """What a training log states, in our words. A reader fills it line by line.

    Args:
        file: the log.
        framework: a name of cost.framework.FRAMEWORKS.
        facts: by the names of Plan, Workload and ModelSpec; and `devices`, `gpu`, `parameters`, `model_name`.
        steps: timed steps in the order of the file.
        reserved_bytes: highest peak that was printed.
        allocated_bytes: highest peak that was printed.
        notes: what was left out, and why.
    """

    file: LogFile
    framework: str
    facts: dict[str, Fact] = field(default_factory=dict)
    steps: list[LoggedStep] = field(default_factory=list)
    reserved_bytes: float | None = None
    allocated_bytes: float | None = None
    notes: list[str] = field(default_factory=list)

    def state(self, name: str, value: Value, line: int, *, implied: bool = False) -> None:
        """Notes a fact. Raises InputError if the log has stated another value before: then it is of several runs."""
        known = self.facts.get(name)
        if known is None or (known.implied and not implied):
            self.facts[name] = Fact(value, line, implied)
        elif known.value != value and not implied:
            allowed = f"line {known.line} has {known.value!r}: a log of one run is needed"
            raise self.file.bad(line, name, value, allowed)

    def reserve(self, count_bytes: float) -> None:
        """Notes a printed peak of reserved memory."""
        self.reserved_bytes = max(self.reserved_bytes or 0.0, count_bytes)

    def allocate(self, count_bytes: float) -> None:
        """Notes a printed peak of allocated memory."""
        self.allocated_bytes = max(self.allocated_bytes or 0.0, count_bytes)

    def value(self, name: str) -> Value | None:
        """The value of a fact; None where the log does not state it."""
        fact = self.facts.get(name)
        return None if fact is None else fact.value
