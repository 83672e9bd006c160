"""The process groups of one plan: made for a trial, and every one of them destroyed exactly once after it.

Ranks count as Megatron-LM's default order does, tp innermost, then dp, pp outermost:
rank = (pp_index * dp + dp_index) * tp + tp_index.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

Ranks = tuple[int, ...]


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


def axis_lines(world_size: int, width: int, stride: int) -> list[Ranks]:
    """All lines of an axis: `width` ranks `stride` apart, each rank of the world in one line."""
    block = width * stride
    starts = [base + offset for base in range(0, world_size, block) for offset in range(stride)]
    return [tuple(range(start, start + block, stride)) for start in starts]


@dataclass(slots=True)
class Groups:
    """Makes groups on all ranks in the same order and remembers its own for `close`.

    A group as wide as the world is the default group: it is lent, never made and never destroyed.
    """

    world_size: int
    _made: list[dist.ProcessGroup] = field(default_factory=list)

    def axis(self, width: int, stride: int, *, single: bool = False) -> dist.ProcessGroup | None:
        """This rank's group on an axis; None for an axis of one rank, unless `single` asks for that group."""
        if width == 1 and not single:
            return None
        return self.among(axis_lines(self.world_size, width, stride))

    def among(self, lines: list[Ranks]) -> dist.ProcessGroup | None:
        """Makes one group for each line; gives the one this rank is in. All ranks must call it alike."""
        if len(lines[0]) == self.world_size:
            return dist.group.WORLD
        mine: dist.ProcessGroup | None = None
        for line in lines:
            group = dist.new_group(list(line))
            if dist.get_rank() in line:
                self._made.append(group)
                mine = group
        return mine

    def close(self) -> None:
        """Destroys what was made, newest first. May be called twice."""
        while self._made:
            dist.destroy_process_group(self._made.pop())


@contextmanager
def trial_groups(world_size: int) -> Iterator[Groups]:
    """Groups for one trial; destroyed at its end, also when it raises.

    After a trial that went well all ranks meet first, so that none closes a connection that another still reads.
    DTensor caches shardings by the shape of the mesh, groups included: a later mesh of the same shape would be
    given the destroyed groups, so those caches go too.
    """
    groups = Groups(world_size)
    try:
        yield groups
        dist.barrier()
    finally:
        groups.close()
        _clear_sharding_prop_cache()


def release_memory(device: torch.device) -> None:
    """Gives back what a finished trial held: cycles of modules and hooks, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
