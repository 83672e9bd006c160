"""What a request is refused for, and what the probes can build and train, are the same: many small models, on meta."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.errors import IllegalPlanError, InputError
from autotune.search.space import Runtime, illegal_reason
from autotune.specs import (
    ClusterSpec,
    Device,
    DeviceKind,
    DType,
    Link,
    ModelSpec,
    Norm,
    Plan,
    Position,
    Recompute,
    StepRequest,
    Workload,
)
from probes.model import Stage
from probes.runnable import check_step
from probes.tensor_parallel import Split, cross_entropy, split_stage

RANKS = 2
CLUSTER = ClusterSpec(
    name="pair", nodes=1, gpus_per_node=RANKS, device=Device(name="cpu", kind=DeviceKind.CPU, memory_bytes=2**40),
    intra=Link(name="loopback"),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[dist.ProcessGroup]:
    """A group of two ranks of which this is one, and that moves nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def drawn(dice: random.Random) -> StepRequest:
    """A small model, mostly of widths that go together, its workload and a plan for two ranks."""
    kv_heads = dice.choice([1, 2, 3, 4])
    position = dice.choice([*Position, Position.ROPE])
    model = ModelSpec(
        name="small",
        layers=dice.choice([1, 2, 3]),
        hidden=dice.choice([1, 2, 6, 8]),
        heads=kv_heads * dice.choice([1, 2, 3]),
        kv_heads=kv_heads,
        head_dim=dice.choice([1, 2, 3, 4, 5, 6, 8]),
        ffn=dice.choice([1, 4, 6]),
        gated=dice.random() < 0.5,
        vocab=dice.choice([1, 6, 7, 8]),
        tied=dice.random() < 0.5,
        norm=dice.choice(list(Norm)),
        position=position,
        max_positions=dice.choice([1, 4, 8] if position is Position.LEARNED else [0, 0, 4, 8]),
        linear_bias=dice.random() < 0.5,
        qkv_bias=dice.random() < 0.5,
        qk_norm=dice.random() < 0.5,
    )
    tp = dice.choice([1, 2])
    plan = Plan(
        tp=tp, dp=RANKS // tp, recompute=dice.choice([Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]),
        sequence_parallel=tp > 1 and dice.random() < 0.5,
    )  # fmt: skip
    workload = Workload(seq_len=dice.choice([1, 2, 3, 4, 8]), global_batch=2, dtype=DType.FP32)
    return StepRequest(model=model, workload=workload, plan=plan)


def trains(request: StepRequest, group: dist.ProcessGroup) -> bool:
    """Whether the model can be built, split, and taken through one step. On meta: shapes are all that there is."""
    model, plan, seq_len = request.model, request.plan, request.workload.seq_len
    try:
        with torch.device("meta"):
            stage = Stage(model, range(model.layers), first=True, last=True, recompute=plan.recompute, seq_len=seq_len)
            if plan.tp > 1:
                split_stage(stage, Split(group, plan.sequence_parallel))
            tokens = torch.zeros((1, seq_len), dtype=torch.long)
            cross_entropy(stage(tokens), tokens, group if plan.tp > 1 else None).backward()
    except (RuntimeError, ValueError):
        return False
    widths = (model.heads, model.kv_heads, model.ffn, model.vocab)  # each rank has the same part of each, or none
    return not any(width % plan.tp for width in widths)


def is_refused_by_probes(request: StepRequest) -> bool:
    try:
        check_step(request, RANKS)
    except (InputError, IllegalPlanError):
        return True
    return False


@pytest.mark.slow
def test_what_is_refused_is_what_cannot_be_trained(pair: dist.ProcessGroup) -> None:
    dice = random.Random(5)
    found = {True: 0, False: 0}
    for _ in range(80):
        request = drawn(dice)
        reason = illegal_reason(request.model, CLUSTER, request.workload, request.plan, Runtime.TORCH)
        too_long = 0 < request.model.max_positions < request.workload.seq_len  # of positions that are not learned
        assert trains(request, pair) == (reason is None) or (too_long and reason is not None), (reason, request)
        assert is_refused_by_probes(request) == (reason is not None), (reason, request)
        found[reason is None] += 1
    assert min(found.values()) > 15
