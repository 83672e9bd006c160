"""The rules that a legal plan keeps: one list, applied to single plans and to whole tables alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autotune.cost.parameters import layer_counts
from autotune.cost.speeds import attention_of
from autotune.cost.table import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    OP,
    SCHEDULES,
    SELECTIVE,
    BoolColumn,
    PlanTable,
    module_bits,
    modules_of,
)
from autotune.specs import ClusterSpec, DType, FrameworkName, ModelSpec, Module, Optimizer, Position, Workload

Integers = npt.NDArray[np.int64]


class Runtime(StrEnum):
    """What runs the plan: any framework of Megatron-LM's kind, or our own step probe on torch's parts."""

    ANY = "any"
    TORCH = "torch"


@dataclass(frozen=True, eq=False)
class Case:
    """A table of plans together with what they are judged by; columns are int64 so that products do not overflow."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    runtime: Runtime
    table: PlanTable

    @cached_property
    def ranks(self) -> npt.NDArray[np.float64]:
        """tp * pp * dp * cp; floats, because four large degrees overflow integers."""
        table = self.table
        return table.tp.astype(np.float64) * table.pp * table.dp * table.cp

    @cached_property
    def chunks(self) -> Integers:
        """pp * vpp."""
        return self.table.pp.astype(np.int64) * self.table.vpp

    @cached_property
    def sequences(self) -> Integers:
        """Sequences of one micro-batch on all replicas: dp * micro_batch."""
        return self.table.dp.astype(np.int64) * self.table.micro_batch

    @cached_property
    def micro_batches(self) -> Integers:
        """m, rounded down where the batch does not divide (another rule refuses that)."""
        return self.workload.global_batch // self.sequences

    @property
    def folds(self) -> BoolColumn:
        """Whether experts are laid out over tp * cp * dp, not over dp * cp (Megatron-Core, MoE parallel folding)."""
        folding = self.workload.framework in FOLDING and self.model.experts > 0 and self.runtime is Runtime.ANY
        return _all_rows(self, folding)

    @cached_property
    def shards(self) -> Integers:
        """dp * cp."""
        return self.table.dp.astype(np.int64) * self.table.cp


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken` marks the rows that break it; `reason` says why for one such row, with the numbers."""

    broken: Callable[[Case], BoolColumn]
    reason: Callable[[Case, int], str]


def _all_rows(case: Case, broken: bool) -> BoolColumn:
    return np.full(len(case.table), broken)


def _not_divisible(name: str, width: Callable[[Case], int]) -> Rule:
    """A width of the model that tp must divide; 0 where the model has no such width."""
    return Rule(
        lambda case: width(case) % case.table.tp != 0 if width(case) else _all_rows(case, False),
        lambda case, i: f"{name} {width(case)} is not divisible by tp {case.table.tp[i]}",
    )


def _linear_heads(model: ModelSpec) -> int:
    """What tp must divide: the heads of values and those of keys; 0 without linear attention."""
    linear = [mixer.linear for mixer in model.mixers if mixer.linear is not None]
    return math.gcd(*(count for each in linear for count in (each.heads, each.key_heads)))


def _torch_only(broken: Callable[[Case], BoolColumn], reason: Callable[[Case, int], str]) -> Rule:
    """A limit of the step probe."""
    return Rule(lambda case: broken(case) if case.runtime is Runtime.TORCH else _all_rows(case, False), reason)


MEGATRONS = frozenset(
    {
        FrameworkName.MEGATRON, FrameworkName.NEMO, FrameworkName.MEGATRON_BRIDGE, FrameworkName.MEGATRON_2021,
        FrameworkName.MEGATRON_DEEPSPEED,
    }
)  # fmt: skip
TODAYS = MEGATRONS - {FrameworkName.MEGATRON_2021, FrameworkName.MEGATRON_DEEPSPEED}
UNEVEN = TODAYS | {FrameworkName.FSDP}
"""Frameworks that run interleaved stages of unequal length."""

FOLDING = TODAYS | {FrameworkName.TORCH}
"""Frameworks whose experts have ranks of their own layout; for `torch` any framework may run the plan."""

NANOTRON, FSDP, DEEPSPEED = FrameworkName.NANOTRON, FrameworkName.FSDP, FrameworkName.DEEPSPEED


def _of(
    frameworks: Collection[FrameworkName], broken: Callable[[Case], BoolColumn], reason: Callable[[Case, int], str]
) -> Rule:
    """A limit of some frameworks; holds where the workload names one of them."""
    return Rule(
        lambda case: broken(case) if case.workload.framework in frameworks else _all_rows(case, False),
        lambda case, i: f"{case.workload.framework.value}: {reason(case, i)}",
    )


def _unavailable(case: Case) -> bool:
    wanted = case.workload.attention
    return wanted is not None and attention_of(case.cluster.device, wanted) is not wanted


MODEL_RULES = (
    Rule(
        lambda case: _all_rows(case, _unavailable(case)),
        lambda case, i: f"attention {case.workload.attention} does not run on {case.cluster.device.name}",
    ),
    _of(
        {NANOTRON},
        lambda case: _all_rows(case, case.model.experts > 0 or case.model.latent_attention is not None),
        lambda case, i: "its Llama model has neither experts nor latent attention",
    ),
    _of(
        {NANOTRON, DEEPSPEED},
        lambda case: _all_rows(case, case.workload.dtype is DType.FP8),
        lambda case, i: "it does not train in fp8",
    ),
    _of(
        {NANOTRON},
        lambda case: _all_rows(case, case.workload.optimizer is Optimizer.SGD),
        lambda case, i: "its SGD keeps no momentum",
    ),
    _torch_only(
        lambda case: _all_rows(case, case.model.experts > 0),
        lambda case, i: f"the step probe trains dense models only, not {case.model.experts} experts",
    ),
    _torch_only(
        lambda case: _all_rows(case, case.model.latent_attention is not None),
        lambda case, i: "the step probe trains plain attention only, not latent attention",
    ),
    _torch_only(
        lambda case: _all_rows(case, not case.model.uniform),
        lambda case, i: "the step probe trains models whose layers are all full attention and an MLP",
    ),
    _torch_only(
        lambda case: _all_rows(case, case.workload.dtype is DType.FP8),
        lambda case, i: "the step probe trains in fp32, bf16 and fp16, not fp8",
    ),
    _torch_only(
        lambda case: _all_rows(case, case.model.position is Position.ROPE and case.model.head_dim % 2 != 0),
        lambda case, i: (
            f"the step probe rotates halves of a head: head_dim {case.model.head_dim} is not divisible by 2"
        ),
    ),
    _torch_only(
        lambda case: _all_rows(case, bool(case.workload.not_probed())),
        lambda case, i: f"the step probe cannot have {case.workload.not_probed()}",
    ),
    Rule(
        lambda case: _all_rows(case, 0 < case.model.max_positions < case.workload.seq_len),
        lambda case, i: f"seq_len {case.workload.seq_len} is longer than max_positions {case.model.max_positions}",
    ),
)

DEGREE_RULES = (
    Rule(
        lambda case: case.ranks != case.cluster.devices,
        lambda case, i: (
            f"tp {case.table.tp[i]} * pp {case.table.pp[i]} * dp {case.table.dp[i]} * cp {case.table.cp[i]} = "
            f"{case.ranks[i]:.0f} ranks, but the cluster has {case.cluster.devices} devices"
        ),
    ),
    _not_divisible("heads", lambda case: case.model.heads),
    # Latent attention has no key heads of its own.
    _not_divisible("kv_heads", lambda case: 0 if case.model.latent_attention else case.model.kv_heads),
    _not_divisible("heads of linear attention", lambda case: _linear_heads(case.model)),
    _not_divisible("ffn", lambda case: case.model.ffn if layer_counts(case.model)[0] else 0),
    _not_divisible("expert_ffn", lambda case: case.model.expert_ffn),
    # Frameworks pad the vocabulary to a multiple of tp; the step probe trains the model as it is.
    _not_divisible("vocab", lambda case: case.model.vocab if case.runtime is Runtime.TORCH else 0),
    Rule(
        lambda case: case.chunks > case.model.layers + (2 if case.workload.framework in TODAYS else 0),
        lambda case, i: f"layers {case.model.layers} are fewer than pp {case.table.pp[i]} * vpp {case.table.vpp[i]}",
    ),
    _torch_only(
        lambda case: case.table.cp > 1,
        lambda case, i: f"the step probe runs no context parallelism: cp {case.table.cp[i]}",
    ),
    Rule(
        lambda case: (case.table.cp > 1) & (case.workload.seq_len % (2 * case.table.cp.astype(np.int64)) != 0),
        lambda case, i: f"seq_len {case.workload.seq_len} is not divisible by 2 * cp {case.table.cp[i]}",
    ),
    _torch_only(
        lambda case: case.table.ep > 1,
        lambda case, i: f"the step probe runs no expert parallelism: ep {case.table.ep[i]}",
    ),
    Rule(
        lambda case: case.model.experts % case.table.ep != 0 if case.model.experts else case.table.ep > 1,
        lambda case, i: (
            f"experts {case.model.experts} is not divisible by ep {case.table.ep[i]}"
            if case.model.experts
            else f"ep {case.table.ep[i]} needs a mixture of experts"
        ),
    ),
    Rule(
        lambda case: (case.shards % case.table.ep != 0) & ~case.folds,
        lambda case, i: f"dp {case.table.dp[i]} * cp {case.table.cp[i]} is not divisible by ep {case.table.ep[i]}",
    ),
    Rule(
        lambda case: (
            case.shards * case.table.tp % (case.table.ep.astype(np.int64) * np.maximum(case.table.etp, 1)) != 0
        ),
        lambda case, i: (
            f"tp {case.table.tp[i]} * dp {case.table.dp[i]} * cp {case.table.cp[i]} is not divisible by "
            f"ep {case.table.ep[i]} * etp {max(case.table.etp[i], 1)}"
        ),
    ),
    Rule(
        lambda case: (case.table.etp > 0) & (case.table.etp != case.table.tp) & ~case.folds,
        lambda case, i: (
            f"etp {case.table.etp[i]}: {case.workload.framework.value} divides experts by tp {case.table.tp[i]}"
            if case.model.experts
            else f"etp {case.table.etp[i]} needs a mixture of experts"
        ),
    ),
    Rule(
        lambda case: case.workload.global_batch % case.sequences != 0,
        lambda case, i: (
            f"global_batch {case.workload.global_batch} is not divisible by "
            f"dp {case.table.dp[i]} * micro_batch {case.table.micro_batch[i]}"
        ),
    ),
)

FRAMEWORK_RULES = (
    _of(
        MEGATRONS | {DEEPSPEED},
        lambda case: (case.table.pp > 1) & (case.table.schedule == GPIPE),
        lambda case, i: "it has no GPipe schedule: use 1f1b",
    ),
    _of(
        TODAYS | {DEEPSPEED},
        lambda case: (case.table.pp > 1) & (case.table.zero_stage > 1),
        lambda case, i: f"zero_stage {case.table.zero_stage[i]} and a pipeline exclude each other",
    ),
    _of(
        {NANOTRON, FrameworkName.MEGATRON_2021, FrameworkName.MEGATRON_DEEPSPEED},
        lambda case: case.table.zero_stage > 1,
        lambda case, i: f"it has ZeRO-0 and ZeRO-1, not {case.table.zero_stage[i]}",
    ),
    _of(
        {FrameworkName.MEGATRON_2021, FrameworkName.MEGATRON_DEEPSPEED, NANOTRON, DEEPSPEED},
        lambda case: case.table.cp > 1,
        lambda case, i: f"it has no context parallelism: cp {case.table.cp[i]}",
    ),
    _of(
        {NANOTRON, DEEPSPEED, FrameworkName.MEGATRON_DEEPSPEED},
        lambda case: case.table.vpp > 1,
        lambda case, i: f"it has no interleaved schedule: vpp {case.table.vpp[i]}",
    ),
    _of(
        {NANOTRON, DEEPSPEED},
        lambda case: case.table.recompute == SELECTIVE,
        lambda case, i: "it recomputes whole layers only",
    ),
    _of(
        {NANOTRON},
        lambda case: (case.table.schedule == ONE_F_ONE_B) & (case.micro_batches < case.table.pp - 1),
        lambda case, i: (
            f"its 1F1B engine needs at least pp - 1 = {case.table.pp[i] - 1} micro-batches a step, not "
            f"{case.micro_batches[i]}"
        ),
    ),
    _of(
        {DEEPSPEED},
        lambda case: (case.table.tp > 1) & ((case.table.pp > 1) | (case.table.zero_stage > 2)),
        lambda case, i: "its tensor parallelism (AutoTP) goes with neither a pipeline nor ZeRO-3",
    ),
    _of(
        {DEEPSPEED, FrameworkName.MEGATRON_DEEPSPEED},
        lambda case: case.table.sequence_parallel,
        lambda case, i: "its tensor parallelism has no sequence parallelism",
    ),
    _of(
        TODAYS,
        lambda case: (case.table.tp > 1) & ~case.table.sequence_parallel & (case.model.experts > 0),
        lambda case, i: "a mixture of experts and tensor parallelism need sequence_parallel",
    ),
    _of(
        {DEEPSPEED},
        lambda case: (
            (case.workload.dtype is DType.BF16)
            & (case.table.pp > 1)
            & (case.table.dp > 1)
            & (case.table.zero_stage == 0)
        ),
        lambda case, i: "its pipeline shards optimizer states in bf16: zero_stage 1",
    ),
    _of(
        {DEEPSPEED},
        lambda case: (
            ((case.table.ep > 1) & (case.table.pp > 1))
            | ((case.model.experts > 0) & (case.table.ep == 1) & (case.table.tp > 1))
        ),
        lambda case, i: "its expert parallelism goes without a pipeline, and its tensor parallelism divides no experts",
    ),
    _of(
        {FSDP},
        lambda case: (case.table.cp > 1) & (case.table.zero_stage < 2),
        lambda case, i: "it shards parameters over context-parallel ranks: zero_stage 2 or 3",
    ),
    _of(
        {FSDP},
        lambda case: (case.table.pp > 1) & case.model.tied,
        lambda case, i: "it ties no embedding to a head across a pipeline",
    ),
    _of(
        {FSDP},
        lambda case: (case.table.schedule != INTERLEAVED) & (case.micro_batches < case.table.pp),
        lambda case, i: (
            f"its schedules need at least pp = {case.table.pp[i]} micro-batches a step, not {case.micro_batches[i]}"
        ),
    ),
    _of(
        {FSDP},
        lambda case: (case.shards > 1) & (case.table.zero_stage == 1),
        lambda case, i: "it shards gradients too: zero_stage 2 or 3, not 1",
    ),
    _of(
        {FSDP},
        lambda case: (case.table.zero_stage == 0) & (case.shards > 1) & (case.table.dp != case.cluster.devices),
        lambda case, i: "its plain data parallelism combines with no other axis: zero_stage 2 or 3",
    ),
    _of(
        {FSDP},
        lambda case: (case.table.tp > 1) & ~case.table.sequence_parallel,
        lambda case, i: "its tensor parallelism is always sequence parallel",
    ),
)
NEEDED: dict[Module, tuple[str, Callable[[ModelSpec], bool]]] = {
    Module.MOE_ACT: ("a mixture of experts", lambda model: model.experts > 0),
    Module.MOE: ("a mixture of experts", lambda model: model.experts > 0),
    Module.SHARED_EXPERTS: ("shared experts", lambda model: model.shared_experts > 0),
    Module.MLA_UP_PROJ: ("latent attention", lambda model: model.latent_attention is not None),
    Module.MLP: ("layers without experts", lambda model: layer_counts(model)[0] > 0),
}
"""Modules that not every model has."""


def _missing_modules(case: Case) -> tuple[Module, ...]:
    return tuple(module for module, (_, has) in NEEDED.items() if not has(case.model))


CHOICE_RULES = (
    _torch_only(
        lambda case: (case.table.recompute == OP) | (case.table.recompute_modules != 0),
        lambda case, i: "the step probe recomputes the attention core or whole layers only",
    ),
    Rule(
        lambda case: (case.table.recompute_modules & module_bits(_missing_modules(case))) != 0,
        lambda case, i: next(
            f"recompute_modules {module.value} needs {NEEDED[module][0]}"
            for module in modules_of(int(case.table.recompute_modules[i]))
            if module in _missing_modules(case)
        ),
    ),
    Rule(
        lambda case: case.table.sequence_parallel & (case.table.tp == 1),
        lambda case, i: "sequence_parallel needs tp > 1",
    ),
    Rule(
        lambda case: (
            case.table.sequence_parallel
            & (case.workload.seq_len % (case.table.tp.astype(np.int64) * case.table.cp) != 0)
        ),
        lambda case, i: (
            f"seq_len {case.workload.seq_len} is not divisible by tp {case.table.tp[i]} * cp {case.table.cp[i]}, "
            "which sequence_parallel needs"
        ),
    ),
    Rule(
        lambda case: (case.table.zero_stage > 0) & (case.shards == 1),
        lambda case, i: f"zero_stage {case.table.zero_stage[i]} shards over dp * cp ranks, and there is one",
    ),
    _torch_only(
        lambda case: (case.table.zero_stage == 2) & (case.table.pp > 1),
        lambda case, i: f"zero_stage 2 with pp {case.table.pp[i]}: the step probe keeps gradients whole in a pipeline",
    ),
    Rule(
        lambda case: (case.table.pp == 1) & (case.table.schedule != ONE_F_ONE_B),
        lambda case, i: f"pp 1 has no pipeline: the schedule must be 1f1b, not {SCHEDULES[case.table.schedule[i]]}",
    ),
    Rule(
        lambda case: (case.table.schedule == INTERLEAVED) != (case.table.vpp > 1),
        lambda case, i: (
            f"vpp {case.table.vpp[i]} with schedule {SCHEDULES[case.table.schedule[i]]}: "
            "interleaved needs vpp > 1, and only interleaved has it"
        ),
    ),
    Rule(
        lambda case: (case.table.schedule == INTERLEAVED) & (case.micro_batches % case.table.pp != 0),
        lambda case, i: (
            f"micro-batches {case.micro_batches[i]} is not divisible by pp {case.table.pp[i]}, which interleaved needs"
        ),
    ),
    Rule(
        lambda case: (
            (case.table.schedule == INTERLEAVED) & (case.model.layers % case.chunks != 0)
            if case.runtime is Runtime.ANY and case.workload.framework not in TODAYS | {FSDP}
            else _all_rows(case, False)
        ),
        lambda case, i: (
            f"layers {case.model.layers} is not divisible by pp {case.table.pp[i]} * vpp {case.table.vpp[i]}, "
            "which interleaved needs"
        ),
    ),
    _torch_only(
        lambda case: (case.table.pp > 1) & (case.table.schedule != GPIPE) & (case.micro_batches < case.table.pp),
        lambda case, i: (
            f"micro-batches {case.micro_batches[i]} are fewer than pp {case.table.pp[i]}: "
            f"torch's {SCHEDULES[case.table.schedule[i]]} needs at least as many"
        ),
    ),
)

ANY_RULES = (*MODEL_RULES, *DEGREE_RULES, *CHOICE_RULES)
"""The rules of every framework."""

RULES = (*ANY_RULES, *FRAMEWORK_RULES)
"""All rules, the most telling first: a plan's reason is the first one that it breaks."""
