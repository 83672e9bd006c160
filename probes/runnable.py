"""What this runtime can run: the reason a request is refused, before any rank does work. Torch-free."""

from __future__ import annotations

from autotune.errors import IllegalPlanError, InputError
from autotune.specs import DType, LayerRequest, ModelSpec, Position, Recompute, Schedule, StepRequest, Workload


def check_step(request: StepRequest, world_size: int) -> None:
    """Refuses a plan that the step probe cannot run on `world_size` ranks.

    Raises:
        IllegalPlanError: which field, its value and what would be allowed.
        InputError: a model or number format that the probes do not implement.
    """
    plan, workload, model = request.plan, request.workload, request.model
    check_model(model, workload)
    _need(plan.cp == 1, "plan.cp", plan.cp, "the step probe runs no context parallelism: 1")
    _need(plan.ep == 1, "plan.ep", plan.ep, "the step probe runs no expert parallelism: 1")
    modules = "+".join(plan.recompute_modules) or plan.recompute.value
    known = not plan.recompute_modules and plan.recompute is not Recompute.OP
    _need(known, "plan.recompute", modules, "the step probe recomputes nothing, the attention core or whole layers")
    _need(plan.world_size == world_size, "plan", plan.key, f"tp*pp*dp must be the {world_size} ranks")
    check_tensor_parallel(model, workload, plan.tp, plan.sequence_parallel)
    rows = plan.dp * plan.micro_batch
    batch = workload.global_batch
    _need(batch % rows == 0, "plan.micro_batch", plan.micro_batch, f"dp*micro_batch must divide {batch}")
    _check_pipeline(request, batch // rows)


def check_layer(request: LayerRequest, world_size: int) -> None:
    """Refuses a layer probe that cannot run on `world_size` ranks. Raises as `check_step` does."""
    check_model(request.model, request.workload)
    _need(world_size % request.tp == 0, "tp", request.tp, f"it must divide the {world_size} ranks")
    check_tensor_parallel(request.model, request.workload, request.tp, request.sequence_parallel)


def check_model(model: ModelSpec, workload: Workload) -> None:
    """Refuses models and number formats that the probes do not implement. Raises InputError."""
    if model.experts:
        raise InputError("model.experts", model.experts, "the probes train dense models only: 0")
    if model.latent_attention is not None:
        raise InputError("model.latent_attention", model.name, "the probes train plain attention only: none")
    if not model.uniform:
        raise InputError("model", model.name, "the probes train models whose layers are all full attention and an MLP")
    if workload.dtype is DType.FP8:
        raise InputError("workload.dtype", "fp8", "the probes train in fp32, bf16 and fp16")
    if model.position is Position.ROPE and model.head_dim % 2:
        raise InputError("model.head_dim", model.head_dim, "the probes rotate halves of a head: it must be even")
    if unlike := workload.not_probed():
        name, _, rest = unlike.partition(" ")
        value, _, allowed = rest.partition(": ")
        raise InputError(f"workload.{name}", value, f"the probes do what torch does: {allowed}")
    if model.max_positions and workload.seq_len > model.max_positions:
        raise InputError("workload.seq_len", workload.seq_len, f"the model has {model.max_positions} positions")


def check_tensor_parallel(model: ModelSpec, workload: Workload, tp: int, sequence_parallel: bool) -> None:
    """Refuses a tensor-parallel degree that does not divide what it splits. Raises IllegalPlanError."""
    widths = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn, "vocab": model.vocab}
    for name, width in widths.items():
        _need(width % tp == 0, "plan.tp", tp, f"it must divide {name} ({width})")
    if sequence_parallel:
        _need(tp > 1, "plan.sequence_parallel", True, "sequence parallelism needs tp > 1")
        _need(workload.seq_len % tp == 0, "plan.tp", tp, f"it must divide seq_len ({workload.seq_len})")


def _check_pipeline(request: StepRequest, micro_batches: int) -> None:
    plan, layers = request.plan, request.model.layers
    interleaved = plan.schedule is Schedule.INTERLEAVED
    _need(plan.pp * plan.vpp <= layers, "plan.pp", plan.pp, f"pp*vpp must not exceed the {layers} layers")
    _need(
        interleaved == (plan.vpp > 1), "plan.vpp", plan.vpp, "vpp > 1 goes with the interleaved schedule, and only so"
    )
    _need(plan.vpp == 1 or plan.pp > 1, "plan.vpp", plan.vpp, "interleaving needs pp > 1")
    _need(plan.zero_stage != 2 or plan.pp == 1, "plan.zero_stage", 2, "with pp > 1 gradients stay whole: 0, 1 or 3")
    if plan.pp > 1 and plan.schedule is not Schedule.GPIPE:
        enough = micro_batches >= plan.pp
        _need(enough, "plan.schedule", plan.schedule.value, f"it needs at least pp micro-batches, not {micro_batches}")
    if interleaved:
        # torch's ScheduleInterleaved1F1B works in rounds of max(1, m // pp) and wants whole rounds.
        rounds = max(1, micro_batches // plan.pp)
        _need(
            micro_batches % rounds == 0, "plan.micro_batch", plan.micro_batch, f"{micro_batches} % {rounds} must be 0"
        )


def _need(condition: bool, what: str, value: object, allowed: str) -> None:
    if not condition:
        raise IllegalPlanError(what, value, allowed)
