"""What every reader of a log works with: the file's lines, and the record of what a training log states."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

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
_OF_A_RANK = re.compile(r"rank\d|default\d|@?\d+,\d+\]|rank=\d|pid=\d|^ *\d+: |\[pod/|^[\w.-]+-\d+ +\|")
"""Labels that tell one rank's lines from another's; a time or a stream does not."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)|(\d\d/\d\d/\d{4}) (\d\d:\d\d:\d\d)")
MAX_TORN = 0.1
"""Share of the lines of steps that may be damaged: ranks that write into each other's lines damage few."""
LABELLED = 0.9
"""Share of the lines that has a host before it, where hosts are labels."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|NPU|XPU)(?: error)?: out of memory|(?:CUDA|HIP|NPU|XPU) out of memory"
    r"|(?:cuda|hip) failure \d* ?'?out of memory|(?:CUBLAS|CUDNN|CUSOLVER|HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: Out of memory",
    re.IGNORECASE,
)

_NUMBER = re.compile(r"[+-]?(?:[\d,]*\.?\d+(?:[eE][+-]?\d+)?|nan|inf)[A-Za-z]?$", re.IGNORECASE)

Value = int | float | str | bool


MAX_LINE_BYTES = 16 << 20
MAX_STEPS = 1_000_000
MAX_NOTES = 1000
_MAX_HOSTS = 100_000
Content = Callable[[], Iterable[bytes]]
"""A file's lines with their ends, from the first, and always the same ones; one that is too long may come in pieces."""


class LogFile:
    """A text file under its name, read line by line each time, so that it may be larger than the memory.

    Lines count from 1 and come without colours and rank labels; the last one only if it has an end.

    Args:
        name: as the user gave it.
        content: of the file.

    Attributes:
        name: of the file.
        cut: the number of the last line if it has no line end: half of it may be missing. Else None.
        out_of_memory: number and text of the first line that tells that a device's memory ran out, or None.

    Raises:
        InputError: an empty file, one that is no text, or one with a line that is too long.
    """

    def __init__(self, name: str, content: Content) -> None:
        self.name, self._content = name, content
        self.cut: int | None = None
        self.out_of_memory: tuple[int, str] | None = None
        self._hosts = False
        self._now = ""
        self._survey()

    def _survey(self) -> None:
        """What has to be known of the whole file before its lines are read."""
        empty, written, labelled, hosts = True, 0, 0, set[str]()
        for number, (raw, ended) in enumerate(self._raw(), start=1):
            blank = not raw.strip()
            empty = empty and blank
            if "\0" in raw:
                raise InputError(self.name, "NUL", "a text file is needed")
            if not ended:
                self.cut = None if blank else number
                break
            line = _unlabelled(raw)
            written += not blank
            if not blank and (match := _HOST.match(line)):
                labelled += 1
                if len(hosts) < _MAX_HOSTS:
                    hosts.add(match[1])
            if self.out_of_memory is None and _tells_of_memory(line) and _OUT_OF_MEMORY.search(line):
                self.out_of_memory = number, line.strip()
        if empty:
            raise InputError(self.name, "", "a log with at least one complete line is needed")
        self._hosts = labelled >= max(LABELLED * written, 2) and len(hosts) <= labelled / 2

    def _raw(self) -> Iterator[tuple[str, bool]]:
        """Each line without its end, and whether it has one."""
        for number, line in enumerate(self._content(), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise self.bad(number, "length", "more", f"at most {MAX_LINE_BYTES >> 20} MiB a line")
            ended = line.endswith(b"\n")
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors="replace"), ended

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number, (raw, ended) in enumerate(self._raw(), start=1):
            if ended:
                line, self._now = _unlabelled(raw), raw
                yield number, _unlabelled(_HOST.sub("", line)) if self._hosts else line

    def label(self) -> str:
        """What stands for a rank before the line that was read last; "" where nothing does."""
        raw = _COLOUR.sub("", self._now)
        before = raw[: len(raw) - len(_unlabelled(self._now))]
        return before if _OF_A_RANK.search(before) else ""

    def stamp_s(self) -> float | None:
        """The time of day and date in the line that was read last, in seconds; None where it has none."""
        match = _STAMP.search(self._now)
        if match is None:
            return None
        day, form = (match[1], "%Y-%m-%d") if match[1] else (match[3], "%m/%d/%Y")
        try:
            return datetime.strptime(f"{day} {match[2] or match[4]}", f"{form} %H:%M:%S").timestamp()
        except ValueError:
            return None

    def rest(self, line: int, most: int) -> str:
        """The text from a line on, at least `most` characters if there are so many."""
        found, size = [], 0
        for _, text in islice(self, line - 1, None):
            found.append(text)
            size += len(text) + 1
            if size > most:
                break
        return "\n".join(found)

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


def _tells_of_memory(line: str) -> bool:
    """Whether a line has a word that each way to say it has: found much sooner than any of those."""
    lowered = line.lower()
    return "memory" in lowered or "alloc_failed" in lowered


def _unlabelled(line: str) -> str:
    """The line without colours and the labels before it; two launchers in a row put two."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    for _ in range(3):
        rest = _LABEL.sub("", line)
        if rest == line:
            break
        line = rest
    return line


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a log states in a line. `implied` is not written there but a default of the framework."""

    value: Value
    line: int
    implied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What one line has of a step (over a logging interval: the mean): its time or a speed, one of the three.

    `rank` is the label of the rank that printed it, `stamp_s` when.
    """

    line: int
    number: int
    time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    rank: str = ""
    stamp_s: float | None = None


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
        torn: lines of steps that are damaged, and left out.
        peaks_of: the ranks whose peak was printed, where the log says whose it is.
    """

    file: LogFile
    framework: str
    facts: dict[str, Fact] = field(default_factory=dict)
    steps: list[LoggedStep] = field(default_factory=list)
    reserved_bytes: float | None = None
    allocated_bytes: float | None = None
    notes: list[str] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    peaks_of: set[int] = field(default_factory=set)

    def state(self, name: str, value: Value, line: int, *, implied: bool = False) -> None:
        """Notes a fact. Raises InputError if the log has stated another value before: then it is of several runs."""
        known = self.facts.get(name)
        if known is None or (known.implied and not implied):
            self.facts[name] = Fact(value, line, implied)
        elif known.value != value and not implied:
            allowed = f"line {known.line} has {known.value!r}: a log of one run is needed"
            raise self.file.bad(line, name, value, allowed)

    def note(self, text: str) -> None:
        """Notes what was left out, of very much only the first."""
        if len(self.notes) == MAX_NOTES:
            self.notes.append("and more of the kind")
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def step(self, step: LoggedStep) -> None:
        """Notes a timed step. Raises InputError for more than a run has."""
        if len(self.steps) == MAX_STEPS:
            raise self.file.bad(step.line, "step", step.number, f"at most {MAX_STEPS:,} timed steps a log")
        self.steps.append(replace(step, rank=self.file.label(), stamp_s=self.file.stamp_s()))

    def figure(self, line: int, found: re.Match[str] | None) -> str | None:
        """The text of the figure that was found in a line of a step; None where the line is damaged, which is noted."""
        if found is not None and _NUMBER.match(found[1]):
            return found[1]
        self.torn.append(line)
        return None

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
