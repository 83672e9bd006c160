"""How often does the interval of an answer carried over from another GPU count hold what was measured there?

For each group of published runs, and each other group of the same model and sequence length on another number of
GPUs, the known group's runs and collective readings are all that is known; the asked group's are only used to judge.
The answer's plan is chosen among the asked group's plans. Prints coverage by source, and by how far apart sizes are.

    python benchmarks/transfer_coverage.py ../shared/data/runs.csv
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.backtest.groups import Group, group_runs
from autotune.backtest.replay import transfers_of
from autotune.backtest.runs import read_runs
from autotune.catalog.published import published_cluster
from autotune.cost.calibrate import fit_profile
from autotune.cost.framework import framework_of
from autotune.errors import AutotuneError
from autotune.knowledge.transfer import carry, moved_profile


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer beside what was measured."""

    source: str
    known: int
    asked: int
    inside: bool
    ran: bool
    share_of_best: float
    width: float


def judged(known: Group, asked: Group) -> Judged | None:
    """The answer for `asked` from `known`; None where no answer is given."""
    profile = fit_profile(known.cluster, "runs file", known.readings, [], []) if known.readings else None
    moved = moved_profile(profile, known.cluster, asked.cluster) if profile else None
    try:
        answer = carry(
            asked.model,
            asked.cluster,
            asked.workload,
            transfers_of(known),
            moved,
            measured_network=False,
            plans=asked.plans,
            framework=framework_of(asked.source),
        )
    except AutotuneError:
        return None
    if answer is None:
        return None
    outcome = next(item for item in asked.outcomes if item.plan == answer.plan)
    low, high = answer.interval
    speed = outcome.tokens_per_s_per_gpu
    width = float(np.log(high / low))
    return Judged(
        asked.source, known.cluster.devices, asked.cluster.devices, low <= speed <= high, outcome.ok,
        speed / asked.best, width,
    )  # fmt: skip


def pairs(groups: list[Group]) -> Iterator[tuple[Group, Group]]:
    """(known, asked) of the same source, model and sequence length on different numbers of GPUs."""
    alike: dict[tuple[str, str, int], list[Group]] = defaultdict(list)
    for group in groups:
        alike[(group.source, group.model.key, group.workload.seq_len)].append(group)
    for items in alike.values():
        for asked in items:
            yield from ((known, asked) for known in items if known.cluster.devices != asked.cluster.devices)


def main(path: str) -> None:
    """Prints the tables."""
    runs, _ = read_runs(Path(path), published_cluster, skip_bad=True)
    groups, _ = group_runs(runs, skip_bad=True)
    found = [item for known, asked in pairs(groups) if (item := judged(known, asked)) is not None]
    print(f"{'source':<18}{'answers':>8}{'ran':>7}{'coverage':>10}{'share of best':>15}{'median width':>14}")
    for source in [*sorted({item.source for item in found}), "all"]:
        _line(source, [item for item in found if source in {item.source, "all"}])
    for low, high in ((1, 2), (2, 4), (4, 8), (8, 1000)):
        within = [item for item in found if low < max(item.asked / item.known, item.known / item.asked) <= high]
        _line(f"{low}-{high} x", within)


def _line(name: str, items: list[Judged]) -> None:
    ran = [item for item in items if item.ran]
    if ran:
        print(
            f"{name:<18}{len(items):>8}{len(ran) / len(items):>7.0%}{np.mean([item.inside for item in ran]):>10.1%}"
            f"{np.mean([item.share_of_best for item in ran]):>15.3f}"
            f"{np.exp(np.median([item.width for item in ran])):>13.2f}x"
        )


if __name__ == "__main__":
    main(sys.argv[1])
