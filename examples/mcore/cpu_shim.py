"""Lets megatron-core 0.16 run on CPU ranks: what it asks of torch.cuda is answered for the CPU. For trying out only;
where there is a GPU do not import it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

assert not torch.cuda.is_available(), "this is for machines without a GPU"
torch.cuda.current_device = lambda: torch.device("cpu")
for _name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
    setattr(torch.cuda, _name, lambda *args, **more: None)
torch.cuda.get_rng_state = lambda *args, **more: torch.get_rng_state()
torch.cuda.set_rng_state = lambda *args, **more: None
torch.Tensor.cuda = lambda self, *args, **more: self


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "cpu"
        return function(*args, **more)

    return call


for _name in ("tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn", "empty_like", "zeros_like"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))


def _typed(dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
    return lambda values: torch.tensor(values, dtype=dtype)


for _name, _dtype in (
    ("FloatTensor", torch.float32), ("IntTensor", torch.int32), ("LongTensor", torch.int64),
    ("ByteTensor", torch.uint8),
):  # fmt: skip
    setattr(torch.cuda, _name, _typed(_dtype))

_type = torch.Tensor.type


def _named_type(self: torch.Tensor, *args: Any, **more: Any) -> Any:
    """It checks for the name of a CUDA type."""
    return _type(self, *args, **more) if args or more else _type(self).replace("torch.", "torch.cuda.")


torch.Tensor.type = _named_type


class _Stream:
    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None


torch.cuda.Stream = torch.cuda.Event = _Stream
torch.cuda.current_stream = lambda *args, **more: _Stream()
torch.cuda.stream = lambda stream: contextlib.nullcontext()

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


@contextlib.contextmanager
def _fork(self: Any, name: str = "") -> Iterator[None]:
    yield


CudaRNGStatesTracker.fork = _fork
