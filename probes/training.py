"""One rank's share of real training under a plan: build it once, then `step` as often as wanted.

How the ZeRO stages run here. Stage 1 reduce-scatters gradients once, after the last micro-batch, and gathers the
parameters once a step. Stage 2 reduce-scatters after every micro-batch and keeps parameters gathered. Stage 3 also
drops gathered parameters after each forward and backward. Under a pipeline torch's schedules keep gradients whole
until the last backward, so stage 2 does not exist there, and stage 3 gathers parameters for every forward and
backward but keeps gradients whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from autotune.specs import Optimizer, StepRequest
from probes.mesh import Coordinates, PlanGroups
from probes.model import Stage
from probes.parallelize import fill_weights, layers_of_stage, local_of, make_schedule, share_data, stages_of_rank
from probes.tensor_parallel import Split, cross_entropy, split_stage


class Training:
    """The rank's chunks of the model, its optimizer and its schedule.

    Args:
        request: a plan that `runnable.check_step` accepts.
        rank: the global rank.
        device: where tensors live.
        axes: the plan's groups; whoever made them destroys them.
    """

    def __init__(self, request: StepRequest, rank: int, device: torch.device, axes: PlanGroups) -> None:
        plan = request.plan
        self.request, self.device = request, device
        self.place = Coordinates.of_rank(rank, plan.tp, plan.dp)
        self.micro_batches = request.workload.global_batch // (plan.dp * plan.micro_batch)
        self.tp, self.ends = axes.tp, axes.ends
        self.mesh = None if axes.dp is None else DeviceMesh.from_group(axes.dp, device.type, mesh_dim_names=("dp",))
        self.indices = stages_of_rank(self.place.pp, plan.pp, plan.vpp)
        self.chunks = [self._chunk(index) for index in self.indices]
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.partial = [chunk.get_parameter(name) for chunk in self.chunks for name in sorted(chunk.partial_names)]
        ends = [module for chunk in self.chunks for module in (chunk.embedding, chunk.head) if module is not None]
        self.shared = [module.weight for module in ends]
        self.masters = [local_of(parameter).detach() for parameter in self.parameters]
        self.optimizer = make_optimizer(request, self.masters)
        self.schedule: Any = None
        if axes.pp is not None:
            self.schedule = make_schedule(request, self.chunks, self.indices, axes.pp, device, self.loss)

    def _chunk(self, index: int) -> Stage:
        plan, model = self.request.plan, self.request.model
        stages = plan.pp * plan.vpp
        with torch.device("meta"):
            chunk = Stage(
                model,
                layers_of_stage(model.layers, stages)[index],
                first=index == 0,
                last=index == stages - 1,
                recompute=plan.recompute,
                seq_len=self.request.workload.seq_len,
            )
        if self.tp is not None:
            split_stage(chunk, Split(self.tp, plan.sequence_parallel))
        if self.mesh is not None:
            share_data(chunk, self.mesh, self.request.workload, plan.zero_stage)
        fill_weights(chunk, self.device, self.request.seed, self.tp)
        return chunk

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This replica's tokens and targets of one step, (rows, sequence): its part of the same global batch."""
        workload, plan = self.request.workload, self.request.plan
        generator = torch.Generator().manual_seed(self.request.seed * 1_000_003 + step)
        shape = (workload.global_batch, workload.seq_len + 1)
        tokens = torch.randint(self.request.model.vocab, shape, generator=generator)
        mine = tokens.chunk(plan.dp)[self.place.dp].to(self.device)
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, scaled so that a step's micro-batches sum up to the mean over the replica's tokens."""
        return cross_entropy(logits, targets, self.tp) / self.micro_batches

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step. Returns the replica's loss, 0 on stages that have none; nothing is waited for."""
        loss = self._through_pipeline(tokens, targets) if self.schedule else self._in_turn(tokens, targets)
        self._complete_gradients()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else local_of(parameter.grad)
            parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _in_turn(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Without a pipeline: one micro-batch after the other, gradients accumulating."""
        chunk, zero_stage = self.chunks[0], self.request.plan.zero_stage
        total = torch.zeros((), device=self.device)
        pairs = zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        for index, (inputs, labels) in enumerate(pairs):
            last = index == self.micro_batches - 1
            if isinstance(chunk, FSDPModule):
                chunk.set_is_last_backward(last)
                chunk.set_requires_gradient_sync(last or zero_stage >= 2)
                chunk.set_reshard_after_backward(last or zero_stage == 3)
            loss = self.loss(chunk(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _through_pipeline(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (tokens,) if self.indices[0] == 0 else ()
        has_loss = self.chunks[-1].head is not None
        self.schedule.step(*inputs, target=targets if has_loss else None, losses=losses, return_outputs=False)
        if not has_loss:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _complete_gradients(self) -> None:
        """Adds up what nothing above did: partial sums over tp, and the two halves of a tied matrix."""
        if self.tp is not None:
            sum_together([p.grad for p in self.partial if p.grad is not None], self.tp)
        if self.ends is not None:
            sum_together([p.grad for p in self.shared if p.grad is not None], self.ends)


def sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce over the local parts of several gradients, in place."""
    parts = [local_of(gradient) for gradient in gradients]
    if not parts:
        return
    sizes = [part.numel() for part in parts]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    for part, total in zip(parts, torch.split(flat, sizes), strict=True):
        part.copy_(total.view_as(part))


def make_optimizer(request: StepRequest, masters: list[Tensor]) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum 0.9, fused, over the local parts of the fp32 master weights.

    Both are elementwise, so local parts give what whole tensors would, without a dispatch for each DTensor.
    """
    held = [master for master in masters if master.numel()]
    if request.workload.optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW(held, lr=request.learning_rate, fused=True)
    return torch.optim.SGD(held, lr=request.learning_rate, momentum=0.9, fused=True)
