"""The step probe's memory account against counts by hand, and what trials leave behind on their ranks: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_ranks import AMPLE_S, cpu_cluster
from training_plans import TINY, step_request

from autotune.specs import Plan
from probes.launch import RankPool

# By hand for the tiny model: 4 layers of 4 h*h attention matrices, 3 h*f MLP matrices and 2 norms; embedding and head.
HIDDEN, FFN, VOCAB, LAYERS = TINY["hidden"], TINY["ffn"], TINY["vocab"], TINY["layers"]
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
TENSORS = LAYERS * 9 + 3
ROTARY_BYTES = 2 * 16 * (HIDDEN // TINY["heads"] // 2) * 4
FP32 = 4


class Ranks:
    """A pool that runs the checks in training_checks."""

    def __init__(self, pool: RankPool, log_dir: Path) -> None:
        self.pool, self.log_dir = pool, log_dir

    def check(self, **request: Any) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + AMPLE_S
        self.pool.start(deadline=deadline, log_dir=self.log_dir)
        data = {"kind": "check", **request}
        gathered = self.pool.run("training_checks", data, deadline=deadline, log_dir=self.log_dir)
        assert gathered.failure is None, gathered.failure
        return gathered.reports


@pytest.fixture(scope="module", params=[1, 2])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(size: int, _rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log_dir = tmp_path_factory.mktemp("inside")
    pool = RankPool(cpu_cluster(size), size)
    yield Ranks(pool, log_dir)
    pool.close()


def test_the_account_counts_storages_once_and_follows_their_resizing(ranks: Ranks) -> None:
    (course, *_) = (report["course"] for report in ranks.check(check="account").values())
    assert course == [
        [4000, 4000],  # 1,000 floats
        [4000, 4000],  # a view and work on an older tensor are nothing new
        [4000, 8000],  # a product of the same size, then the first is gone
        [0, 8000],  # its storage emptied ...
        [400, 8000],  # ... and partly filled again
        [0, 8000],
        [0, 8000],  # closed
    ]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_shards_what_it_says(ranks: Ranks, size: int, zero_stage: int) -> None:
    plan = Plan(dp=size, micro_batch=2, zero_stage=zero_stage)
    shards = size if zero_stage else 1
    states = FP32 * PARAMETERS // shards
    for report in ranks.check(check="live", plan=plan.to_data(), changes={}).values():
        assert report["built"] == states + ROTARY_BYTES
        assert report["with_gradients"] == 2 * states + ROTARY_BYTES
        # AdamW's two moments, and one fp32 step counter a tensor.
        assert report["trained"] == 3 * states + FP32 * TENSORS + ROTARY_BYTES


def test_trials_leave_nothing_behind(ranks: Ranks, size: int) -> None:
    plans = [{"micro_batch": 2}]
    if size == 2:
        plans = [
            {"tp": 2, "sequence_parallel": True},
            {"pp": 2, "schedule": "gpipe"},
            {"dp": 2, "zero_stage": 3},
            {"dp": 2},
            {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        ]
    for report in ranks.check(check="repeat", plans=plans, times=30).values():
        assert report["groups"] == [1, 1]
        assert report["descriptors"][1] == report["descriptors"][0]
        grown_bytes = report["resident_bytes"][1] - report["resident_bytes"][0]
        assert grown_bytes < 4 << 20


def test_the_tiny_model_is_what_was_counted() -> None:
    assert step_request(Plan()).model.layers == LAYERS
    assert PARAMETERS == 4 * (4 * 1024 + 3 * 2048 + 64) + 2 * 2048 + 32
