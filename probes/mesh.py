"""The process groups of one plan: made for a trial, and every one of them destroyed exactly once after it.

Ranks count as Megatron-LM's default order does, tp innermost, then dp, pp outermost:
rank = (pp_index * dp + dp_index) * tp + tp_index.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from autotune.errors import InputError
from autotune.specs import ModelSpec, Plan
from probes.timing import align

# GroupSet: process groups that are created once and destroyed exactly once. Runs on ranks.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands on the three axes of a plan."""

    tp: int
    dp: int
    pp: int

    @classmethod
    def of_rank(cls, rank: int, tp: int, dp: int) -> Coordinates:
        """The coordinates of global rank `rank`."""
        return cls(tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroups:
    """This rank's group on each axis; None where the axis has one rank and needs none.

    `ends` joins first and last pipeline stage where they hold the two copies of a tied embedding. A group as wide as
    the world is the default group.
    """

    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None

    @classmethod
    def make(cls, plan: Plan, model: ModelSpec, groups: GroupSet, *, single_dp: bool) -> PlanGroups:
        """Makes a plan's groups, which `groups` will destroy. All ranks must call it alike.

        With `single_dp` the dp axis has a group also where it is one rank wide: FSDP wants one.
        """
        width = plan.tp * plan.dp
        tp = axis(groups, plan.tp, 1)
        dp = axis(groups, plan.dp, plan.tp, single=single_dp)
        pp = axis(groups, plan.pp, width)
        ends = None
        if model.tied and pp is not None:
            last = (plan.pp - 1) * width
            ends = pp if plan.pp == 2 else _ends(groups, width, last)
        return cls(tp=tp, dp=dp, pp=pp, ends=ends)


def axis(groups: GroupSet, width: int, stride: int, *, single: bool = False) -> dist.ProcessGroup | None:
    """This rank's group of `width` ranks `stride` apart; None for one rank, unless `single` asks for that group.

    An axis as wide as the world is the default group, which is lent and never destroyed.
    """
    world_size = dist.get_world_size()
    if width == 1 and not single:
        return None
    if width == world_size:
        return dist.group.WORLD
    block = width * stride
    starts = [base + offset for base in range(0, world_size, block) for offset in range(stride)]
    return groups.create([range(start, start + block, stride) for start in starts])


def _ends(groups: GroupSet, width: int, last: int) -> dist.ProcessGroup | None:
    """One group for each pair of corresponding ranks of first and last stage, and one for all between, unused."""
    pairs = [(index, index + last) for index in range(width)]
    group = groups.create([*pairs, range(width, last)])
    return group if dist.get_rank() % last < width else None


@contextmanager
def trial_groups(device: torch.device) -> Iterator[GroupSet]:
    """Groups for one trial, destroyed at its end.

    What lives before it outlives it, so the garbage collector is told to look at newer objects only: neither the
    timed steps nor the clean-up afterwards shall pay for visiting all of torch.
    All ranks meet first, so that none closes a connection that another still reads. DTensor caches shardings by the
    shape of the mesh, groups included: a later mesh of the same shape would be given the destroyed groups, so that
    cache goes too.
    """
    gc.freeze()
    with GroupSet() as groups:
        try:
            yield groups
            align(device)
        finally:
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
