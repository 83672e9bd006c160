"""The collective probe, on a rank: one operation over a sweep of sizes, all groups of the world at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autotune.specs import CollectiveOp, CollectiveRequest, ProbeProgress
from probes.context import RankContext
from probes.mesh import GroupSet
from probes.reports import members

_ELEMENT_BYTES = 4  # float32, nccl-tests' default
# torch 2.13 renamed these two and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run(request: CollectiveRequest, context: RankContext) -> dict[str, Any]:
    """Measures the sweep and returns {"sweep": [{"size_bytes", "times_s"}, ...]}, see merge_collective.

    Sizes are rounded down to whole elements a rank, at least one, and reported as they were moved.

    Raises:
        InputError: the groups do not divide the world.
    """
    sweep = []
    with GroupSet() as groups:
        group = groups.create(members(request, context.world_size))
        for done, size_bytes in enumerate(request.sizes_bytes):
            context.emit(ProbeProgress(phase="sweep", done=done, total=len(request.sizes_bytes)))
            count = max(1, size_bytes // (_ELEMENT_BYTES * request.group_size))
            call = _operation(request.op, count, group, context.device)
            times_s = _time(call, request, context.device)
            sweep.append({"size_bytes": count * request.group_size * _ELEMENT_BYTES, "times_s": times_s})
        context.emit(ProbeProgress(phase="sweep", done=len(sweep), total=len(sweep)))
    return {"sweep": sweep}


def _time(call: Callable[[], None], request: CollectiveRequest, device: torch.device) -> list[float]:
    """Seconds of each iteration after the warm-up. The barrier before each, over the whole world, is not counted."""
    times_s = []
    for _ in range(request.warmup + request.iterations):
        dist.barrier()
        _synchronize(device)
        start_s = time.perf_counter()
        call()
        _synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return times_s[request.warmup :]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _operation(op: CollectiveOp, count: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """The operation on `count` elements a rank, on buffers allocated once.

    `count` times the group's size is the whole buffer: what is reduced, gathered, scattered, exchanged or sent.
    """
    whole = torch.full((count * group.size(),), 0.0, device=device)  # sums of zeros stay finite
    if op is CollectiveOp.ALL_REDUCE:
        return lambda: _discard(dist.all_reduce(whole, group=group))
    if op is CollectiveOp.SEND_RECV:
        return _exchange(whole, group)
    part = torch.full((count,), 0.0, device=device)
    if op is CollectiveOp.ALL_GATHER:
        return lambda: _discard(_all_gather(whole, part, group=group))
    if op is CollectiveOp.REDUCE_SCATTER:
        return lambda: _discard(_reduce_scatter(part, whole, group=group))
    received = torch.empty_like(whole)
    return lambda: _discard(dist.all_to_all_single(received, whole, group=group))


def _exchange(sent: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Both ranks of a pair send to and receive from each other at once, as nccl-tests' sendrecv does."""
    received = torch.empty_like(sent)
    peer = dist.get_global_rank(group, 1 - dist.get_rank(group))

    def call() -> None:
        # The receive first: gloo announces it on the connection that a send would already fill, and the two directions
        # would then take turns instead of running at once.
        pair = [dist.P2POp(dist.irecv, received, peer, group), dist.P2POp(dist.isend, sent, peer, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return call


def _discard(_: object) -> None:
    """Synchronous collectives return nothing of use."""
