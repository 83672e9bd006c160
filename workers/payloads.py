"""What each task's message may carry: ids, and nothing else. Everything else is refused before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from autotune.errors import InputError
from autotune.specs.base import Name

MOST_TOKEN = 2**63 - 1
MOST_TUNINGS = 1000

Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
GpuSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=1, le=MOST_TOKEN)]


class TaskName(StrEnum):
    """The tasks of the fleet."""

    ADVANCE = "autotune.advance"
    SCHEDULE = "autotune.schedule"
    RUN = "autotune.run"
    CANARY = "autotune.canary"
    SWEEP = "autotune.sweep"
    REGRESS = "autotune.regress"
    CHECK = "autotune.check"


_PAYLOADS: Mapping[TaskName, TypeAdapter[Any]] = {
    TaskName.ADVANCE: TypeAdapter(Annotated[tuple[Id, ...], Field(min_length=1, max_length=MOST_TUNINGS)]),  # tunings
    TaskName.SCHEDULE: TypeAdapter(tuple[Name]),  # pool
    TaskName.RUN: TypeAdapter(tuple[Id, Token]),  # job, the grant's token
    TaskName.CANARY: TypeAdapter(tuple[Id]),  # session
    TaskName.SWEEP: TypeAdapter(tuple[()]),
    TaskName.REGRESS: TypeAdapter(tuple[GpuSeconds | None]),  # budget
    TaskName.CHECK: TypeAdapter(tuple[Id]),  # job that measured for it
}


def read_payload(task: TaskName, arguments: Sequence[object], named: Mapping[str, object]) -> tuple[Any, ...]:
    """The task's arguments, if they are exactly what it takes. Raises InputError for anything else."""
    if named:
        raise InputError(str(task), sorted(named), "it takes no named arguments")
    try:
        found: tuple[Any, ...] = _PAYLOADS[task].validate_python(tuple(arguments), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(str(task), first.get("input"), first["msg"]) from None
    return found
