"""Which layers live on which stage, and torch's pipeline schedules over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from autotune.specs import Schedule, StepRequest
from probes.model import Stage
from probes.parallelize import TORCH_DTYPES


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
