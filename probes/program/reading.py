"""From what a program prints or writes to its steps."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import InputError
from autotune.specs import StepRequest, Workload
from autotune.specs.command import Speed, SpeedFrom, Unit
from probes.program.steps import Step, Steps

METRICS_VARIABLE = "AUTOTUNE_METRICS"
"""The directory where our callback writes."""

_LONGEST_LINE = 4096
_MOST_BYTES = 1 << 20
"""Of one file in one look."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStep:
    """A step of a framework's own log: its time or one of two speeds, and the peak memory that was printed by then."""

    number: int
    time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """What whole lines of a framework's log tell: steps, and the sequences a step by which it counts samples."""

    steps: tuple[LogStep, ...] = ()
    global_batch: int | None = None


ReadLog = Callable[[str, bytes], LogLines]
"""Reads whole lines of a framework's log. Raises InputError for a line that it does not understand."""


def no_logs(framework: str, lines: bytes) -> LogLines:
    """Where nobody gave readers of logs."""
    raise InputError("speed.source", framework, "readers of logs are not at hand here")


class Source(Protocol):
    """Where steps come from."""

    def lines(self, lines: list[bytes], arrived_s: float) -> None:
        """Takes whole lines of what the program prints."""

    def look(self) -> None:
        """Looks at what it writes elsewhere."""

    @property
    def wanted(self) -> str:
        """What it looks for, in words."""


def source_of(
    speed: Speed, steps: Steps, request: StepRequest, metrics: str, callback_dir: Path, read_log: ReadLog
) -> Source:
    """The source that a command's file names."""
    if speed.source is SpeedFrom.PATTERN:
        return _Pattern(speed, steps, request)
    if speed.source is SpeedFrom.CALLBACK:
        return _Callback(steps, callback_dir)
    if speed.source is SpeedFrom.JSON_LINES:
        return _JsonLines(speed, steps, request, Path(metrics))
    return _Log(speed.source.value, steps, request, read_log)


def seconds_a_step(unit: Unit, figure: float, workload: Workload, devices: int) -> float | None:
    """Seconds of a step from a program's figure; None for one that tells nothing (a speed of 0)."""
    if not 0.0 < figure < float("inf"):
        return None
    return {
        Unit.S: figure,
        Unit.MS: figure / 1e3,
        Unit.STEPS: 1.0 / figure,
        Unit.SAMPLES: workload.global_batch / figure,
        Unit.TOKENS: workload.tokens_per_step / figure,
        Unit.TOKENS_PER_GPU: workload.tokens_per_step / (figure * devices),
    }.get(unit)


class _Figures:
    """Makes steps of told figures."""

    def __init__(self, speed: Speed, steps: Steps, request: StepRequest) -> None:
        self._speed, self._steps, self._request = speed, steps, request
        self._count = 0

    def add(self, told: Mapping[str, Any], arrived_s: float) -> None:
        unit = self._speed.unit
        assert unit is not None
        figure = _number(told.get("speed"))
        time_s = None
        if unit is not Unit.ARRIVAL:
            time_s = seconds_a_step(unit, figure or 0.0, self._request.workload, self._request.plan.world_size)
            if time_s is None:
                return
        number = _number(told.get("step"))
        self._count += 1
        memory = _number(told.get("memory"))
        step = Step(
            number=self._count if number is None else int(number),
            time_s=time_s,
            arrived_s=arrived_s,
            loss=_number(told.get("loss")),
            memory_bytes=memory * self._speed.memory_unit.count_bytes if memory else None,
        )
        self._steps.add(step)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.search(str(value))
    return float(found[0].replace(",", "")) if found else None


class _Pattern:
    def __init__(self, speed: Speed, steps: Steps, request: StepRequest) -> None:
        self._pattern, self._figures = re.compile(speed.pattern), _Figures(speed, steps, request)
        self.wanted = f"a line like {speed.pattern!r}"

    def lines(self, lines: list[bytes], arrived_s: float) -> None:
        for line in lines:
            if found := self._pattern.search(line[:_LONGEST_LINE].decode(errors="replace")):
                self._figures.add(found.groupdict(), arrived_s)

    def look(self) -> None:
        """All is printed."""


_TELLS_SPEED_IF = {"deepspeed": "it tells its speed at log level info, which 0.19 is not at by itself"}
"""What a framework's log needs before speeds are in it."""


class _Log:
    """A framework's own log, through our readers of logs."""

    def __init__(self, framework: str, steps: Steps, request: StepRequest, read: ReadLog) -> None:
        self._framework, self._steps, self._request, self._read = framework, steps, request, read
        self._complaint = ""
        self._batch: int | None = None  # DeepSpeed's AutoTP counts the ranks of tp as replicas

    @property
    def wanted(self) -> str:
        """What it looks for, in words."""
        said = self._complaint or _TELLS_SPEED_IF.get(self._framework, "")
        return f"a step in a log of {self._framework}" + (f" ({said})" if said else "")

    def lines(self, lines: list[bytes], arrived_s: float) -> None:
        found = self._try(lines)
        if found is None:  # one line that is not understood does not hide the others
            found = [step for line in lines for step in self._try([line]) or ()]
        workload, devices = self._request.workload, self._request.plan.world_size
        for each in found:
            time_s = each.time_s
            if each.tokens_per_s_per_gpu:
                time_s = seconds_a_step(Unit.TOKENS_PER_GPU, each.tokens_per_s_per_gpu, workload, devices)
            elif each.samples_per_s:
                time_s = (self._batch or workload.global_batch) / each.samples_per_s
            if time_s:
                self._steps.add(
                    Step(number=each.number, time_s=time_s, arrived_s=arrived_s, memory_bytes=each.memory_bytes)
                )

    def _try(self, lines: list[bytes]) -> list[LogStep] | None:
        if not any(line.strip() for line in lines):
            return []
        try:
            read = self._read(self._framework, b"\n".join(lines) + b"\n")
            self._batch = read.global_batch or self._batch
            return list(read.steps)
        except InputError as error:
            self._complaint = self._complaint or str(error)
            return None

    def look(self) -> None:
        """All is printed."""


class _Tail:
    """The whole lines that were appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._rest = path, 0, b""

    def new_lines(self) -> list[bytes]:
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._at)
            chunk = file.read(_MOST_BYTES)
            self._at += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[:_MOST_BYTES]
            return lines
        return []

    def objects(self) -> Iterable[dict[str, Any]]:
        for line in self.new_lines():
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


class _JsonLines:
    def __init__(self, speed: Speed, steps: Steps, request: StepRequest, path: Path) -> None:
        self._tail, self._keys, self._figures = _Tail(path), speed.keys, _Figures(speed, steps, request)
        self.wanted = f"a JSON object a line with {', '.join(speed.keys.values())} in {path.name}"

    def lines(self, lines: list[bytes], arrived_s: float) -> None:
        """It writes to a file."""

    def look(self) -> None:
        for found in self._tail.objects():
            self._figures.add({ours: found.get(theirs) for ours, theirs in self._keys.items()}, time.monotonic())


class _Callback:
    """What our callback writes: rank-R.jsonl. Steps are those of the lowest rank; memory is the worst one's."""

    def __init__(self, steps: Steps, directory: Path) -> None:
        self._steps, self._directory = steps, directory
        self._tails: dict[int, _Tail] = {}
        self._leading: int | None = None
        self.wanted = "a step of the callback (autotune_callback)"

    def lines(self, lines: list[bytes], arrived_s: float) -> None:
        """It writes to files."""

    def look(self) -> None:
        for path in self._directory.glob("rank-*.jsonl"):
            with contextlib.suppress(ValueError):
                self._tails.setdefault(int(path.stem.removeprefix("rank-")), _Tail(path))
        for rank, tail in sorted(self._tails.items()):
            for found in tail.objects():
                self._add(rank, found)

    def _add(self, rank: int, found: Mapping[str, Any]) -> None:
        memory_bytes = _number(found.get("memory_bytes"))
        self._steps.memory_bytes = max(self._steps.memory_bytes, memory_bytes or 0.0)
        self._leading = rank if self._leading is None else self._leading
        number, time_s = _number(found.get("step")), _number(found.get("time_s"))
        if rank == self._leading and number is not None and time_s:
            loss = _number(found.get("loss"))
            # Its clock is ours: CLOCK_MONOTONIC is one for all processes of a machine.
            at_s = _number(found.get("at_s")) or time.monotonic()
            self._steps.add(Step(number=int(number), time_s=time_s, arrived_s=at_s, loss=loss))
