"""Plan: one parallel configuration. Whether it is legal is decided in search.space, which gives the reason."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from autotune.errors import InputError
from autotune.specs.base import Spec
from autotune.specs.model import Count


class Recompute(StrEnum):
    """Activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198).

    `selective` recomputes the attention core (scores and context); `full` keeps only each layer's input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Schedule(StrEnum):
    """The pipeline schedule. With pp = 1 there is none and the plan says 1f1b."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Plan(Spec):
    """Degrees of tensor, pipeline, data, context and expert parallelism, and the choices that go with them.

    The world is tp * pp * dp * cp ranks, tp innermost, pp outermost (Megatron's order tp-cp-ep-dp-pp); ep
    takes its ranks from dp. `vpp` is the number of model chunks a pipeline rank holds.
    """

    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    cp: Count = 1
    ep: Count = 1
    vpp: Count = 1
    micro_batch: Count = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def key(self) -> str:
        """A short canonical name, unique to the plan: `tp2.pp1.dp4.mb1.zero1` and what differs from default."""
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [
            f"{name}{value}" for name, value in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if value > 1
        ]
        parts += [f"mb{self.micro_batch}", f"zero{self.zero_stage}"]
        if self.recompute is not Recompute.NONE:
            parts.append(f"rc-{self.recompute.value}")
        if self.sequence_parallel:
            parts.append("sp")
        if self.schedule is not Schedule.ONE_F_ONE_B:
            parts.append(self.schedule.value)
        return ".".join(parts)

    @classmethod
    def parse(cls, text: str, devices: int | None = None) -> Plan:
        """Reads `tp=8,pp=4,micro_batch=1,...`; a missing dp is what is left of `devices`.

        Raises:
            InputError: a key or value that cannot be used, or devices not divisible by tp*pp*cp.
        """
        data: dict[str, object] = {}
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            key, sign, value = item.partition("=")
            if not sign or key not in cls.model_fields:
                raise InputError("--plan", item, "give key=value with keys " + ", ".join(cls.model_fields))
            if key in data:
                raise InputError("--plan", item, "each key may be given once")
            data[key] = _value(value)
        if int_of(data, "vpp") > 1:
            data.setdefault("schedule", Schedule.INTERLEAVED.value)
        if "dp" not in data and devices is not None:
            rest = int_of(data, "tp") * int_of(data, "pp") * int_of(data, "cp")
            if rest < 1 or devices % rest:
                raise InputError("--plan", text, f"tp*pp*cp must divide the {devices} devices")
            data["dp"] = devices // rest
        return cls.from_data(data, "--plan")


def int_of(data: dict[str, object], key: str) -> int:
    """The integer under `key`, 1 where it is absent or no integer (validation will complain)."""
    value = data.get(key, 1)
    return value if isinstance(value, int) else 1


def _value(text: str) -> object:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
