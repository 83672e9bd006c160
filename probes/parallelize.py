"""Tensor and data parallelism on one stage of the model, from torch's own parts; then its weights.

The stage comes on the meta device, so no rank ever holds more than one whole parameter.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from autotune.specs import DType, Workload
from probes.model import Rotary, Stage

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def split_tensors(stage: Stage, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) over a 1-D mesh, in place.

    The input of attention and MLP becomes one DTensor before their first matrices, so that the gradients of these
    sum up before one all-reduce (reduce-scatter with sequence parallelism, Korthikanti et al. 2022): two
    communications forward and two backward a layer. Logits stay split over the vocabulary.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    column = partial(ColwiseParallel, use_local_output=True)
    row = partial(RowwiseParallel, output_layouts=between)
    whole = partial(PrepareModuleInput, input_layouts=(between,), desired_input_layouts=(Replicate(),))
    for layer in stage.layers.values():
        styles: dict[str, ParallelStyle] = {
            "attention": whole(), "mlp": whole(), "attention.output": row(), "mlp.down": row(), "mlp.up": column(),
        }  # fmt: skip
        styles |= {f"attention.{name}": column() for name in ("query", "key", "value")}
        if layer.mlp.gate is not None:
            styles["mlp.gate"] = column()
        if layer.attention.query_norm is not None:
            # Each rank normalises its own heads with the same weights: their gradients are partial sums.
            norm = partial(SequenceParallel, sequence_dim=2, use_local_output=True)
            styles |= {"attention.query_norm": norm(), "attention.key_norm": norm()}
        if sequence_parallel:
            styles |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(layer, mesh, styles)
    parallelize_module(stage, mesh, _end_styles(stage, sequence_parallel))
    stage.tie()


def _end_styles(stage: Stage, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How embedding, positions, final norm and head are split, where they live on this stage."""
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if stage.positions is not None and sequence_parallel:
        styles["positions"] = SequenceParallel(use_local_output=True)
    if stage.head is not None:
        styles["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        if sequence_parallel:
            styles["norm"] = SequenceParallel()
    return styles


def share_data(stage: Stage, mesh: DeviceMesh, workload: Workload, zero_stage: int) -> None:
    """Data parallelism over a 1-D mesh, in place: ZeRO 0 keeps whole copies, 1 to 3 shard (what, `training` says).

    With a number format below fp32 the master weights stay fp32 and the computing copy has that format. Both
    `replicate` and `fully_shard` compute on a copy apart from the masters, in fp32 too.
    """
    dtype = TORCH_DTYPES[workload.dtype]
    policy = MixedPrecisionPolicy()
    if workload.dtype is not DType.FP32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=TORCH_DTYPES[workload.grad_dtype])
    if zero_stage == 0:
        share = partial(replicate, mesh=mesh, mp_policy=policy)
        outer = share
    else:
        share = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        # What the stage itself holds (embedding, head) is needed again as soon as backward starts.
        outer = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for layer in stage.layers.values():
        share(layer)
    outer(stage)


def fill_weights(stage: Stage, device: torch.device, seed: int) -> None:
    """Gives a stage on meta its memory and its weights: the same numbers under every plan.

    Each parameter is drawn whole on the device from a generator seeded by (seed, its global name), one at a time;
    the rank keeps its slice. Matrices are normal with deviation 0.02, norm weights 1, biases 0.
    """
    stage.to_empty(device=device)
    stage.tie()
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            whole = _whole(name, parameter, device, seed, tied=stage.tied)
            local_of(parameter).copy_(_slice_of(whole, parameter))
    for module in stage.modules():
        if isinstance(module, Rotary):
            module.fill()


def _whole(name: str, parameter: nn.Parameter, device: torch.device, seed: int, *, tied: bool) -> Tensor:
    if parameter.ndim == 1:
        fill = 0.0 if name.endswith("bias") else 1.0
        return torch.full(parameter.shape, fill, device=device)
    if tied and name == "head.weight":
        name = "embedding.weight"  # on the last of several stages: the same numbers as on the first
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(parameter.shape, device=device).normal_(0.0, 0.02, generator=generator)


def _slice_of(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part of a whole tensor that this rank holds: the tp slice first, then the dp chunk of it."""
    if not isinstance(parameter, DTensor):
        return whole
    names = parameter.device_mesh.mesh_dim_names or ()
    for name in ("tp", "dp"):
        if name not in names:
            continue
        axis = names.index(name)
        placement = parameter.placements[axis]
        dim = getattr(placement, "dim", 0)
        if not placement.is_replicate():
            size, index = parameter.device_mesh.size(axis), parameter.device_mesh.get_local_rank(axis)
            chunks = whole.chunk(size, dim=dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def local_of(tensor: Tensor) -> Tensor:
    """This rank's own part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
