"""GroupSet: process groups that are created once and destroyed exactly once. Runs on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist

from autotune.errors import InputError


class GroupSet:
    """The groups that one probe created.

    Dropping the last reference to a group does not free its communicator (pytorch#40400), so every group made here is
    destroyed in `close`, in reverse order. The default group is never among them. As a context manager it closes on
    success and after an InputError, which all ranks raise alike; after any other error the ranks are killed, and
    destroying a communicator whose peer is gone may wait for ever, so it is left alone.
    """

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []

    def create(self, members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Creates one group per list of ranks and returns this rank's own.

        A collective call: every rank of the world makes it with the same lists, which cover the world once.
        """
        own: dist.ProcessGroup | None = None
        for ranks in members:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                own = group
                self._groups.append(group)
        if own is None:
            raise InputError("groups", dist.get_rank(), "every rank must be in one group")
        return own

    def close(self) -> None:
        """Destroys the groups. May be called twice."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def __enter__(self) -> GroupSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, InputError):
            self.close()
