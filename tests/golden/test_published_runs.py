"""Uncalibrated estimates against published runs: the catalog and the assumed efficiencies, nothing fitted to them."""

from __future__ import annotations

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.specs import Basis, DType, Plan, Recompute, Schedule, Workload


# Korthikanti et al. 2022 (arXiv:2205.05198), table 5: GPT-3 175B on 64 A100-80GB, iteration seconds.
@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "published_s"),
    [(Recompute.FULL, False, 18.13), (Recompute.SELECTIVE, True, 13.75)],
)
def test_gpt3_on_64_gpus_within_a_tenth(recompute: Recompute, sequence_parallel: bool, published_s: float) -> None:
    plan = Plan(
        tp=8,
        pp=8,
        vpp=3,
        schedule=Schedule.INTERLEAVED,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    workload = Workload(seq_len=2048, global_batch=64, dtype=DType.FP16)
    found = estimate(model("gpt3-175b"), cluster_from_shorthand("a100-80gb-sxm:8x8"), workload, plan)
    assert found.step_time_s == pytest.approx(published_s, rel=0.10)
    assert found.fits
    assert found.basis is Basis.CATALOG
