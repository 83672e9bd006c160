"""What can happen to a rank, as requests that tests send to real ranks: {"kind": NAME, "rank": who, ...}."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autotune.errors import InputError
from probes.context import RankContext

Request = dict[str, Any]
_leaked: list[torch.Tensor] = []


def run(request: Request, context: RankContext) -> Request:
    """Does what `kind` says on `rank` (all ranks if it is absent); then all ranks meet in a barrier."""
    print(f"hazard {request['kind']} on rank {context.rank}")
    answer: Request = {"rank": context.rank}
    if request.get("rank", context.rank) == context.rank:
        answer |= _HAZARDS[request["kind"]](request)
    dist.barrier()
    return answer


def _tensor(request: Request) -> Request:
    return {"elements": torch.empty(request["bytes"], dtype=torch.uint8).fill_(1).numel()}


def _objects(request: Request) -> Request:
    """Small Python objects up to `bytes`: the interpreter's own allocator runs out."""
    return {"objects": len([bytes(256) for _ in range(request["bytes"] // 256)])}


def _backward(request: Request) -> Request:
    """The allocation that fails is made by autograd."""
    weight = torch.ones(request["bytes"] // 4 // 3, requires_grad=True)
    (weight * 2 * weight * 3).sum().backward()
    return {}


def _leak(request: Request) -> Request:
    _leaked.append(torch.empty(request["bytes"], dtype=torch.uint8).fill_(1))
    return {}


def _segfault(_: Request) -> Request:
    ctypes.string_at(0)
    return {}


def _bad_alloc(_: Request) -> Request:
    """What C++ does when an allocation fails in a thread where nobody catches it."""
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    os.abort()


def _exit(request: Request) -> Request:
    sys.exit(request["status"])


def _bug(_: Request) -> Request:
    raise ValueError("first line\nthe last line")


def _refuse(_: Request) -> Request:
    raise InputError("hazard", "refuse", "nothing is")


def _silence(_: Request) -> Request:
    """Waits for a message that nobody sends."""
    dist.recv(torch.empty(1), src=1 - dist.get_rank())
    return {}


def _timeout(_: Request) -> Request:
    """gloo's own timeout: a communication error without any death."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), src=1, group=group)
    return {}


def _nothing(_: Request) -> Request:
    return {"groups": len(dist.distributed_c10d._world.pg_map)}


_HAZARDS: dict[str, Callable[[Request], Request]] = {
    "tensor": _tensor, "objects": _objects, "backward": _backward, "leak": _leak, "segfault": _segfault,
    "bad_alloc": _bad_alloc, "exit": _exit, "bug": _bug, "refuse": _refuse, "silence": _silence,
    "timeout": _timeout, "nothing": _nothing,
}  # fmt: skip
