"""What a search believes of plans and would run next, held still to six digits.

As in test_estimates.py the figures are what was believed when they were written down, not worked out by hand. If they
are to change: `.venv/bin/python tests/golden/test_posteriors.py` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate_table
from autotune.cost.framework import TORCH, Framework, framework_of
from autotune.cost.table import PlanTable
from autotune.search.acquisition import expected_gain
from autotune.search.core import Measurement, Search
from autotune.search.residual import Learning
from autotune.search.transfer import Shown, merged, transfers_of
from autotune.specs import Failure, FailureKind, Plan, Recompute, Schedule, Workload

FIGURES = Path(__file__).with_name("posteriors.json")
COLUMNS = ("log_mean", "log_sd", "peak_bytes", "p_fits", "trial_gpu_s", "expected_gain")
MODEL, CLUSTER = model("llama2-7b"), cluster_from_shorthand("a100-80gb-sxm:2x8")
WORK = Workload(seq_len=2048, global_batch=64)
PLANS = [
    Plan(dp=16, zero_stage=3),
    Plan(tp=2, dp=8, zero_stage=1),
    Plan(tp=2, dp=8, micro_batch=2, zero_stage=2, recompute=Recompute.SELECTIVE, sequence_parallel=True),
    Plan(tp=4, dp=4, micro_batch=2, zero_stage=1, sequence_parallel=True),
    Plan(tp=4, pp=2, dp=2, micro_batch=4, schedule=Schedule.GPIPE),
    Plan(tp=2, pp=4, dp=2, micro_batch=2),
    Plan(pp=4, dp=4, vpp=2, schedule=Schedule.INTERLEAVED),
    Plan(tp=8, dp=2, micro_batch=8, recompute=Recompute.FULL),
    Plan(dp=16, micro_batch=2, zero_stage=1),
    Plan(pp=2, dp=8, micro_batch=4, zero_stage=1),
    Plan(dp=8, cp=2, zero_stage=1),
]


@dataclass(frozen=True)
class Case:
    """A search, and whether anything was told to it, by trials and by another tuning."""

    framework: Framework = TORCH
    trials: int = 0
    wild: bool = False
    transfers: bool = False
    learning: Learning = Learning()  # noqa: RUF009

    def search(self) -> Search:
        transfers = _elsewhere(self.framework) if self.transfers else ()
        search = Search(
            MODEL, CLUSTER, WORK, plans=PLANS, framework=self.framework, transfers=transfers, learning=self.learning
        )
        bases, peaks = search.estimates.tokens_per_s_per_gpu, search.estimates.reserved_bytes
        told = [(0, 0.8, 1.1), (5, 0.65, 0.95), (3, 0.9, 1.02), (6, 0.7, 1.05), (7, 0.85, 0.9)][: self.trials]
        for row, speed, peak in told:
            noise = 0.3 if self.wild and row == 3 else 0.01
            factor = 0.2 if self.wild and row == 5 else speed
            search.tell(
                PLANS[row],
                Measurement(
                    tokens_per_s_per_gpu=float(bases[row]) * factor, relative_noise=noise, setup_s=3.0 + row,
                    peak_bytes=float(peaks[row]) * peak,
                ),
                gpu_s=10.0,
            )  # fmt: skip
        if self.trials:
            search.tell(PLANS[8], Failure(kind=FailureKind.OOM, message=""), gpu_s=5.0)
        return search

    def figures(self) -> dict[str, list[float]]:
        search = self.search()
        posterior = search.posterior()
        columns = [getattr(posterior, name) for name in COLUMNS[:-1]] + [np.minimum(expected_gain(posterior), 1e9)]
        found = {name: column.tolist() for name, column in zip(COLUMNS, columns, strict=True)}
        found |= {name: list(values) for name, values in posterior.calibration.items()}
        chosen = search.next()
        assert chosen is not None
        return found | {"chosen": [float(chosen.row), chosen.p_fits, chosen.gpu_s]}


def _elsewhere(framework: Framework) -> Sequence[object]:
    """What a larger model on more nodes showed, twice, and one that ran out of memory."""
    cluster, work = cluster_from_shorthand("a100-80gb-sxm:4x8"), Workload(seq_len=2048, global_batch=128)
    plans = [Plan(tp=4, pp=2, dp=4), Plan(tp=8, dp=4, micro_batch=2), Plan(pp=8, dp=4), Plan(tp=8, pp=4)]
    estimates = estimate_table(model("llama2-13b"), cluster, work, PlanTable.of(plans), framework=framework)
    bases, peaks = estimates.tokens_per_s_per_gpu, estimates.reserved_bytes

    def shown(factor: float) -> list[Shown]:
        return [
            Shown(tokens_per_s_per_gpu=float(bases[0]) * factor, peak_bytes=float(peaks[0]) * 1.08),
            Shown(tokens_per_s_per_gpu=float(bases[1]) * 0.9 * factor, peak_bytes=None),
            Shown(tokens_per_s_per_gpu=None, peak_bytes=None, out_of_memory=True),
            Shown(tokens_per_s_per_gpu=float(bases[3]) * 0.2 * factor, peak_bytes=float(peaks[3]) * 0.9),
        ]

    return merged([*transfers_of(plans, estimates, shown(0.8)), *transfers_of(plans, estimates, shown(0.7))])


CASES = {
    "nothing told": Case(),
    "two trials": Case(trials=2),
    "five trials": Case(trials=5),
    "five trials, two of them noisy or wild": Case(trials=5, wild=True),
    "a checked framework": Case(framework=framework_of("megatron_sc21"), trials=5),
    "a checked framework contradicted": Case(framework=framework_of("hf_ultrascale"), trials=5, wild=True),
    "another tuning": Case(transfers=True),
    "another tuning and five trials": Case(trials=5, transfers=True),
    "parameters alone": Case(trials=5, learning=Learning(residual=False)),
    "what plans share alone": Case(trials=5, learning=Learning(calibration=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_search_believes_what_it_did(name: str) -> None:
    expected = json.loads(FIGURES.read_text())[name]
    found = CASES[name].figures()
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert values == pytest.approx(expected[key], rel=1e-6, abs=1e-9), key


def write() -> None:
    """Writes the figures anew, a column a line."""
    cases = {
        name: ",\n".join(
            f"{json.dumps(key)}: {json.dumps([float(f'{value:.8g}') for value in values])}"
            for key, values in case.figures().items()
        )
        for name, case in CASES.items()
    }
    FIGURES.write_text(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {{\n{text}\n}}" for key, text in cases.items()) + "\n}\n"
    )


if __name__ == "__main__":
    write()
