"""Plan: one parallel configuration. Whether it is legal is decided in search.space, which gives the reason."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from autotune.errors import InputError
from autotune.specs.base import Spec, mismatch
from autotune.specs.model import Count, CountOrZero


class Recompute(StrEnum):
    """Activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198).

    `selective` recomputes the attention core (scores and context), or the modules that the plan names; `full` keeps
    only each layer's input. `op` keeps each layer's input, the context and every second product of its dense matrices
    (torchtitan's `selective_ac_option = "op"`).
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    OP = "op"


class Module(StrEnum):
    """What `selective` may recompute, in the words of Megatron-LM's --recompute-modules."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"


class Schedule(StrEnum):
    """The pipeline schedule. With pp = 1 there is none and the plan says 1f1b."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Plan(Spec):
    """Degrees of tensor, pipeline, data, context and expert parallelism, and the choices that go with them.

    The world is tp * pp * dp * cp ranks, tp innermost, pp outermost (Megatron's order tp-cp-ep-dp-pp). The
    tp * cp * dp ranks of a stage are divided anew for experts: each expert is on `etp` ranks next to each other, and ep
    such groups hold all of them. `etp` 0 is tp where ep divides dp * cp, else 1. `vpp` is the number of model chunks a
    pipeline rank holds. `recompute_modules` are those of selective recomputation; none stands for the attention core.
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
    recompute_modules: tuple[Module, ...] = ()
    etp: CountOrZero = 0

    @field_validator("recompute_modules")
    @classmethod
    def _in_order(cls, modules: tuple[Module, ...]) -> tuple[Module, ...]:
        """One spelling for each set of modules: in the order of their names, the default left out."""
        ordered = tuple(sorted(set(modules)))
        return () if ordered == (Module.CORE_ATTN,) else ordered

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recompute_modules and self.recompute is not Recompute.SELECTIVE:
            allowed = f"modules go with recompute selective, not {self.recompute.value}"
            raise mismatch("recompute_modules", "+".join(self.recompute_modules), allowed)
        return self

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that an expert is divided over."""
        return self.etp or (1 if self.dp * self.cp % self.ep else self.tp)

    @property
    def key(self) -> str:
        """A short canonical name, unique to the plan: `tp2.pp1.dp4.mb1.zero1` and what differs from default."""
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [
            f"{name}{value}" for name, value in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if value > 1
        ]
        parts += [f"etp{self.etp}"] if self.etp else []
        parts += [f"mb{self.micro_batch}", f"zero{self.zero_stage}"]
        if self.recompute is not Recompute.NONE:
            parts.append("-".join(["rc", "+".join(self.recompute_modules) or self.recompute.value]))
        if self.sequence_parallel:
            parts.append("sp")
        if self.schedule is not Schedule.ONE_F_ONE_B:
            parts.append(self.schedule.value)
        return ".".join(parts)

    @classmethod
    def parse(cls, text: str, devices: int | None = None) -> Plan:
        """Reads `tp=8,pp=4,micro_batch=1,...`; a missing dp is what is left of `devices`. Modules are joined by +.

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
            modules = [name for name in value.split("+") if name]
            data[key] = modules if key == "recompute_modules" else _value(value)
        if data.get("recompute_modules"):
            data.setdefault("recompute", Recompute.SELECTIVE.value)
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
