"""What starts a program on a node: its own arguments, or torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.specs.command import Launcher
from probes.program.rendering import Place


class Start(Protocol):
    """Makes a program's arguments the command that is really run."""

    def __call__(self, argv: Sequence[str], place: Place) -> list[str]:
        """The command of one node."""


def given(argv: Sequence[str], place: Place) -> list[str]:
    """As the command's file has it."""
    return list(argv)


def torchrun(argv: Sequence[str], place: Place) -> list[str]:
    """The interpreter `argv[0]` runs torchrun, which runs the script `argv[1]` once a rank; static rendezvous."""
    where = ("--master-addr", place.master_addr, "--master-port", str(place.master_port))
    size = ("--nnodes", str(place.nnodes), "--node-rank", str(place.node_rank), "--nproc-per-node", str(place.nproc))
    return [argv[0], "-m", "torch.distributed.run", *size, *where, "--max-restarts", "0", *argv[1:]]


STARTS: dict[Launcher, Start] = {Launcher.GIVEN: given, Launcher.TORCHRUN: torchrun}
