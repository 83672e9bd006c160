"""Data parallelism on one stage of the model, by torch's fully_shard and replicate; then its weights.

The stage comes on the meta device, so no rank ever holds more than one whole parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from autotune.specs import DType, Schedule, StepRequest, Workload
from probes.model import Rotary, Stage

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def share_data(stage: Stage, mesh: DeviceMesh, workload: Workload, zero_stage: int) -> None:
    """Data parallelism over a 1-D mesh, in place: ZeRO 0 keeps whole copies, 1 to 3 shard (what, `training` says).

    With a number format below fp32 the master weights stay fp32 and the computing copy has that format. Both
    `replicate` and `fully_shard` compute on a copy apart from the masters, in fp32 too. fp16 has no loss scaling: a
    probe measures speed, and the few numbers a scaler would add to a step are not what decides it.
    """
    dtype = TORCH_DTYPES[workload.dtype]
    policy = MixedPrecisionPolicy()
    if workload.dtype is not DType.FP32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=TORCH_DTYPES[workload.reduce_dtype or workload.gradients]
        )
    if zero_stage == 0 and mesh.size() > 1:  # on one rank `replicate` would reduce with itself
        for layer in stage.layers.values():
            replicate(layer, mesh=mesh, mp_policy=policy)
        replicate(stage, mesh=mesh, mp_policy=policy)
        return
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
    # What the stage itself holds (embedding, head) is needed again as soon as backward starts.
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def fill_weights(stage: Stage, device: torch.device, seed: int, tp: dist.ProcessGroup | None) -> None:
    """Gives a stage on meta its memory and its weights: the same numbers under every plan.

    Each parameter is drawn whole on the device from a generator seeded by (seed, its global name), one at a time;
    the rank keeps its slice. Matrices are normal with deviation 0.02, norm weights 1, biases 0.
    """
    stage.to_empty(device=device)
    stage.tie()
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            dim = stage.split_dims.get(name)
            whole = _whole(stage, name, parameter, device, seed, 1 if dim is None or tp is None else tp.size())
            if dim is not None and tp is not None:
                whole = whole.chunk(tp.size(), dim=dim)[tp.rank()]
            local_of(parameter).copy_(_dp_chunk(whole, parameter))
    for module in stage.modules():
        if isinstance(module, Rotary):
            module.fill()


def _whole(stage: Stage, name: str, parameter: nn.Parameter, device: torch.device, seed: int, parts: int) -> Tensor:
    """The whole tensor of which `parameter` is one of `parts` along its split dim."""
    shape = list(parameter.shape)
    if parts > 1:
        shape[stage.split_dims[name]] *= parts
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
    if stage.tied and name == "head.weight":
        name = "embedding.weight"  # on the last of several stages: the same numbers as on the first
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)


def _dp_chunk(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """The rows that this replica holds, as `fully_shard` cuts them: dim 0, the last ranks may have fewer or none."""
    if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
        return tensor
    chunks = tensor.chunk(parameter.device_mesh.size(), dim=0)
    index = parameter.device_mesh.get_local_rank()
    return chunks[index] if index < len(chunks) else tensor[:0]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's own part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Which layers live on which stage, and torch's pipeline schedules over them.


def layers_of_stage(layers: int, stages: int) -> list[range]:
    """Contiguous layers for each of `stages` stages; the first ones take the layers that are left over."""
    share, extra = divmod(layers, stages)
    starts = [index * share + min(index, extra) for index in range(stages + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(stages)]


def stages_of_rank(pp_index: int, pp: int, vpp: int) -> list[int]:
    """The stages of a pipeline rank: with interleaving stage i lives on rank i mod pp (loop placement)."""
    return list(range(pp_index, pp * vpp, pp))


def make_schedule(
    request: StepRequest,
    chunks: Sequence[Stage],
    indices: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    loss: Callable[[Any, Any], Any],
) -> Any:
    """The plan's torch schedule over this rank's chunks.

    All shapes are given, so that no stage has to run to find them (with FSDP that hangs or leaves its state
    behind). `loss` is already scaled to the whole batch: the schedule must not scale gradients again.
    """
    plan = request.plan
    stages = [
        PipelineStage(chunk, index, plan.pp * plan.vpp, device, group=group, **_edges(request, chunk))
        for chunk, index in zip(chunks, indices, strict=True)
    ]
    micro_batches = request.workload.global_batch // (plan.dp * plan.micro_batch)
    if plan.schedule is Schedule.INTERLEAVED:
        return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]
    kind = ScheduleGPipe if plan.schedule is Schedule.GPIPE else Schedule1F1B
    return kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)


def _edges(request: StepRequest, chunk: Stage) -> dict[str, Any]:
    """Examples, on meta, of what enters and leaves a chunk: this rank's own part of one micro-batch."""
    plan, model, dtype = request.plan, request.model, TORCH_DTYPES[request.workload.dtype]
    rows, length = plan.micro_batch, request.workload.seq_len
    local_length = length // plan.tp if plan.sequence_parallel else length
    hidden = torch.empty(rows, local_length, model.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, length, model.vocab // plan.tp, dtype=dtype, device="meta", requires_grad=True)
    return {
        "input_args": tokens if chunk.embedding is not None else hidden,
        "output_args": logits if chunk.head is not None else hidden,
    }
