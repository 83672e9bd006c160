"""Tensor and sequence parallelism on plain local tensors, as Megatron-LM does it.

Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2. A layer
communicates twice forward and twice backward: an all-reduce each, or with sequence parallelism an all-gather and
a reduce-scatter. Written on local tensors because the measured time must be the hardware's: dispatching every
operation through DTensor costs several times more host time than a small layer's own work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probes.model import Layer, Stage

# torch 2.13 renamed these two and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Split:
    """The tensor-parallel group and whether the parts between its matrices are split over the sequence."""

    group: dist.ProcessGroup
    sequence: bool

    @property
    def size(self) -> int:
        """t, the number of ranks."""
        return self.group.size()

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    def enter(self, hidden: Tensor) -> Tensor:
        """Whole hidden states for split matrices; backward sums their gradients (and splits them again)."""
        return _apply(_GatherSequence if self.sequence else _Copy, hidden, self.group)

    def leave(self, partial_sums: Tensor) -> Tensor:
        """The sum over ranks of what split matrices gave, each rank its part of the sequence if that is split."""
        return _apply(_ScatterSequence if self.sequence else _Reduce, partial_sums, self.group)


def split_stage(stage: Stage, split: Split) -> None:
    """Splits a stage on meta over a group, in place: matrices get local shapes, hooks communicate.

    Fills `stage.split_dims` (parameter name to the dim that is split) and `stage.partial_names`, the parameters that
    every rank holds whole but whose gradients are partial sums over the group.
    """
    for index in stage.layers:
        _split_layer(stage, f"layers.{index}.", split)
    if stage.embedding is not None:
        _narrow(stage, "embedding.weight", 0, split.size)
        _split_vocabulary(stage.embedding, split)
    if stage.positions is not None and split.sequence:
        stage.positions.part, stage.positions.parts = split.index, split.size
        stage.partial_names.add("positions.weight")
    if stage.head is not None:
        if not (stage.tied and stage.embedding is not None):
            _narrow(stage, "head.weight", 0, split.size)
        stage.tie()
        stage.head.register_forward_pre_hook(partial(_enter, split))
        if split.sequence:
            stage.partial_names.update(_names(stage, "norm."))


def _split_layer(stage: Stage, prefix: str, split: Split) -> None:
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
    for name in _names(stage, prefix):
        owner, kind = name.removeprefix(prefix).rsplit(".", 1)
        if owner in columns:
            _narrow(stage, name, 0, split.size)
        elif owner in ("attention.output", "mlp.down") and kind == "weight":
            _narrow(stage, name, 1, split.size)
        elif split.sequence or owner in ("attention.query_norm", "attention.key_norm"):
            stage.partial_names.add(name)  # sees its part of the sequence, or its own heads, only
    layer = stage.get_submodule(prefix.rstrip("."))
    assert isinstance(layer, Layer)
    for block in (layer.attention, layer.mlp):
        block.register_forward_pre_hook(partial(_enter, split))
    layer.attention.output.join = layer.mlp.down.join = split.leave


def _names(stage: Stage, prefix: str) -> list[str]:
    return [name for name, _ in stage.named_parameters() if name.startswith(prefix)]


def _narrow(stage: Stage, name: str, dim: int, size: int) -> None:
    owner, kind = name.rsplit(".", 1)
    shape = list(stage.get_parameter(name).shape)
    shape[dim] //= size
    setattr(stage.get_submodule(owner), kind, nn.Parameter(torch.empty(shape, device="meta")))
    stage.split_dims[name] = dim


def _enter(split: Split, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return split.enter(inputs[0])


def _split_vocabulary(embedding: nn.Embedding, split: Split) -> None:
    """Each rank looks up the tokens in its rows and gives zeros for others; the sum is the embedding."""
    rows = embedding.weight.size(0)
    first = split.index * rows

    def lookup(tokens: Tensor) -> Tensor:
        local = tokens - first
        foreign = (local < 0) | (local >= rows)
        found = nn.functional.embedding(local.masked_fill(foreign, 0), embedding.weight)
        return split.leave(found.masked_fill(foreign.unsqueeze(-1), 0.0))

    embedding.forward = lookup  # type: ignore[method-assign, assignment]


def cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Mean cross entropy in fp32 over (batch, sequence, vocab / t) logits, split over `group` if there is one.

    Keeps one fp32 copy of the local logits between forward and backward. Targets are global token ids.
    """
    apply: Any = _CrossEntropy.apply
    loss: Tensor = apply(logits.flatten(0, -2), targets.flatten(), group)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        local = targets - (0 if group is None else group.rank() * logits.size(-1))
        foreign = (local < 0) | (local >= logits.size(-1))
        local = local.masked_fill(foreign, 0).unsqueeze(-1)
        softmax = logits.to(torch.float32, copy=True)
        highest = softmax.amax(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        softmax.sub_(highest)
        found = softmax.gather(-1, local).squeeze(-1).masked_fill(foreign, 0.0)
        total = softmax.exp_().sum(dim=-1)
        if group is not None:
            sums = torch.stack((found, total))
            dist.all_reduce(sums, group=group)
            found, total = sums.unbind()
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, foreign)
        ctx.dtype = logits.dtype
        return (total.log() - found).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, foreign = ctx.saved_tensors
        softmax.scatter_add_(-1, local, foreign.to(softmax.dtype).sub_(1.0).unsqueeze(-1))
        return softmax.mul_(gradients[0] / local.numel()).to(ctx.dtype), None, None


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    apply: Any = function.apply
    result: Tensor = apply(tensor, group)
    return result


def _reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, in place where memory allows: callers pass fresh products that nothing else reads."""
    tensor = tensor.detach().contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows, length, width = tensor.shape
    parts = tensor.new_empty(group.size(), rows, length, width)
    _all_gather(parts.flatten(0, 1), tensor.contiguous(), group=group)
    return parts.transpose(0, 1).reshape(rows, group.size() * length, width)


def _scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows, length, width = tensor.shape
    parts = tensor.view(rows, group.size(), length // group.size(), width).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    _reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def _function(
    name: str, forward: Callable[[Tensor, Any], Tensor], backward: Callable[[Tensor, Any], Tensor]
) -> type[torch.autograd.Function]:
    def run(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return forward(tensor, group)

    def pull(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return backward(gradient, ctx.group), None

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(run), "backward": staticmethod(pull)})


def _same(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


_Copy = _function("_Copy", _same, _reduced)
_Reduce = _function("_Reduce", _reduced, _same)
_GatherSequence = _function("_GatherSequence", _gathered, _scattered)
_ScatterSequence = _function("_ScatterSequence", _scattered, _gathered)
