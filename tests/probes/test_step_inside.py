"""The step probe's memory account against counts by hand, and what trials leave behind on their ranks: nothing."""

from __future__ import annotations

import pytest
from local_ranks import InsideProber
from training_plans import TINY, step_request

from autotune.specs import Plan

# By hand for the tiny model: 4 layers of 4 h*h attention matrices, 3 h*f MLP matrices and 2 norms; embedding and head.
HIDDEN, FFN, VOCAB, LAYERS = TINY["hidden"], TINY["ffn"], TINY["vocab"], TINY["layers"]
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
TENSORS = LAYERS * 9 + 3
ROTARY_BYTES = 2 * 16 * (HIDDEN // TINY["heads"] // 2) * 4
FP32 = 4


@pytest.fixture(scope="module", params=[1, 2])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(size: int, request: pytest.FixtureRequest) -> InsideProber:
    found = request.getfixturevalue("one" if size == 1 else "pair")
    assert isinstance(found, InsideProber)
    return found


def test_the_account_counts_storages_once_and_follows_their_resizing(ranks: InsideProber) -> None:
    (course, *_) = (report["course"] for report in ranks.check("training_checks", check="account").values())
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
def test_zero_shards_what_it_says(ranks: InsideProber, size: int, zero_stage: int) -> None:
    plan = Plan(dp=size, micro_batch=2, zero_stage=zero_stage)
    shards = size if zero_stage else 1
    states = FP32 * PARAMETERS // shards
    for report in ranks.check("training_checks", check="live", plan=plan.to_data(), changes={}).values():
        assert report["built"] == states + ROTARY_BYTES
        assert report["with_gradients"] == 2 * states + ROTARY_BYTES
        # AdamW's two moments, and one fp32 step counter a tensor.
        assert report["trained"] == 3 * states + FP32 * TENSORS + ROTARY_BYTES


@pytest.mark.slow
def test_trials_leave_nothing_behind(ranks: InsideProber, size: int) -> None:
    plans = [{"micro_batch": 2}]
    if size == 2:
        plans = [
            {"tp": 2, "sequence_parallel": True},
            {"pp": 2, "schedule": "gpipe"},
            {"dp": 2, "zero_stage": 3},
            {"dp": 2},
            {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        ]
    for report in ranks.check("training_checks", check="repeat", plans=plans, times=20).values():
        assert report["groups"] == [1, 1]
        assert report["descriptors"][1] == report["descriptors"][0]
        grown_bytes = report["resident_bytes"][1] - report["resident_bytes"][0]
        assert grown_bytes < 2 << 20


def test_the_tiny_model_is_what_was_counted() -> None:
    assert step_request(Plan()).model.layers == LAYERS
    assert PARAMETERS == 4 * (4 * 1024 + 3 * 2048 + 64) + 2 * 2048 + 32
