"""TensorAccount: the bytes of all CPU tensor storages that come and go while it is open.

Every operator's results are seen through torch's dispatcher, releases through weak references, whichever thread lets
go last (gloo's threads often do). FSDP frees and refills storages by resizing them, so resizing is watched too.
What an operator allocates and frees within itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class TensorAccount:
    """Counts from `open` to `close`; both figures keep their last value afterwards.

    Storages that existed before count as nothing, also when they go. Only one account can be open at a time.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._mode: Any = _Watch(self)
        self._resize: Callable[..., Any] | None = None

    def open(self) -> None:
        """Starts counting on this thread."""
        resize = self._resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, *sizes: Any) -> Any:
            result = resize(storage, *sizes)
            self._set(storage, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        self._mode.__enter__()

    def close(self) -> None:
        """Stops counting. May be called twice, or without `open`."""
        if self._resize is None:
            return
        self._mode.__exit__(None, None, None)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._resize = None
        self._known.clear()  # weak references that are gone call nobody back

    def meet(self, tensor: Tensor) -> None:
        """Takes note of a tensor that an operator made."""
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._set(storage, storage.nbytes())

    def _set(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        key = storage._cdata
        known = self._known.get(key)
        gone = weakref.ref(storage, lambda _: self._leave(key)) if known is None else known[0]
        self._known[key] = (gone, size_bytes)
        self._change(size_bytes - (0 if known is None else known[1]))

    def _leave(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._change(-known[1])

    def _change(self, signed_bytes: int) -> None:
        self.live_bytes += signed_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows an account the tensors that operators make; DTensors are left to their local operators."""

    def __init__(self, account: TensorAccount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account = account
        self._makes: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        makes = self._makes.get(func)
        if makes is None:
            # Views and in-place operators, whose results alias their arguments by their schema, make nothing.
            makes = self._makes[func] = all(part.alias_info is None for part in func._schema.returns)
        if makes:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor):
                    self._account.meet(part)
        return result
