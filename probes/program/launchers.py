"""What starts a program: its own arguments, torchrun on each node, or srun once for all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.specs.command import Launcher
from probes.program.rendering import Place


class Start(Protocol):
    """Makes a program's arguments the command that is really run."""

    def __call__(self, argv: Sequence[str], place: Place) -> list[str]:
        """The command of one node; of all where `Launcher.starts_all`."""


def given(argv: Sequence[str], place: Place) -> list[str]:
    """As the command's file has it."""
    return list(argv)


def torchrun(argv: Sequence[str], place: Place) -> list[str]:
    """The interpreter `argv[0]` runs torchrun, which runs the script `argv[1]` once a rank; static rendezvous."""
    where = ("--master-addr", place.master_addr, "--master-port", str(place.master_port))
    size = ("--nnodes", str(place.nnodes), "--node-rank", str(place.node_rank), "--nproc-per-node", str(place.nproc))
    return [argv[0], "-m", "torch.distributed.run", *size, *where, "--max-restarts", "0", *argv[1:]]


def slurm(argv: Sequence[str], place: Place) -> list[str]:
    """One torchrun a node of this Slurm allocation, which meet at the first node; srun ends all when one fails."""
    step = ("--nodes", str(place.nnodes), "--ntasks", str(place.nnodes), "--ntasks-per-node", "1")
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{place.master_addr}:{place.master_port}")
    size = ("--nnodes", str(place.nnodes), "--nproc-per-node", str(place.nproc), "--rdzv-id", "autotune")
    run = [argv[0], "-m", "torch.distributed.run", *size, *meet, "--max-restarts", "0", *argv[1:]]
    return ["srun", *step, "--kill-on-bad-exit=1", "--unbuffered", "--label", *run]


STARTS: dict[Launcher, Start] = {Launcher.GIVEN: given, Launcher.TORCHRUN: torchrun, Launcher.SLURM: slurm}
