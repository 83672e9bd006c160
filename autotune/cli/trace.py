"""`autotune trace`: where the time of a profiler's trace goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options, output


def trace(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Traces of torch.profiler, .json or .json.gz, one a rank.")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Computation and communication in Kineto traces: T_calc, T_comm, exposed, mu, by collective and rank.

    Of GPUs what ran on the device counts (NCCL, RCCL, mscclpp and the like communicate), of CPUs torch's operators and
    gloo's collectives. Waiting for a slower peer within a collective counts as communication.
    """
    from probes.kineto import read_traces

    found = [each.to_data() for each in read_traces(files)]
    data = {"ranks": found, "source": "measured"}

    def people() -> None:
        seconds = output.seconds_text
        table = output.table(
            "Where the time goes (measured)",
            "rank", "<device", "steps", "span", "T_calc", "T_comm", "exposed", "mu", "<by collective",
        )  # fmt: skip
        for each in found:
            parts = sorted(each["by_collective"].items(), key=lambda item: -item[1]["seconds"])
            table.add_row(
                "-" if each["rank"] is None else str(each["rank"]), each["device"], str(each["steps"] or "-"),
                *(seconds(each[name]) for name in ("span_s", "t_calc_s", "t_comm_s", "t_comm_exposed_s")),
                output.count_text(each["mu"]),
                ", ".join(f"{name} {seconds(part['seconds'])} in {part['count']}" for name, part in parts),
            )  # fmt: skip
        output.console().print(table)

    output.tell(data, people, as_json=as_json)
