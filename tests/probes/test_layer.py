"""The layer probe against what a layer must keep, counted from its tensors by hand."""

from __future__ import annotations

from typing import Any

import pytest
from local_ranks import AMPLE_S
from training_plans import TINY

from autotune.specs import FailureKind, LayerReading, LayerRequest
from probes.launch import LocalProber
from probes.reports import merge_layer

ROWS, LENGTH, HIDDEN, FFN, VOCAB = 2, 64, 128, 256, 512
MODEL = TINY | {"hidden": HIDDEN, "ffn": FFN, "vocab": VOCAB}
STATE_BYTES = ROWS * LENGTH * HIDDEN * 4  # one (batch, sequence, hidden) tensor in fp32


def layer_request(**changes: Any) -> LayerRequest:
    workload = {"seq_len": LENGTH, "global_batch": 4, "dtype": changes.pop("dtype", "fp32")}
    request = {"model": MODEL, "workload": workload, "part": "layer", "micro_batch": ROWS, "warmup": 1, "iterations": 2}
    return LayerRequest.from_data(request | changes)


def reading(prober: LocalProber, **changes: Any) -> LayerReading:
    outcome = prober.run(layer_request(**changes), deadline_s=AMPLE_S)
    assert outcome.failure is None, outcome.failure
    (read,) = outcome.readings
    assert isinstance(read, LayerReading)
    return read


def test_a_layer_without_tp_only_computes(pair: LocalProber) -> None:
    read = reading(pair)
    assert read.forward_calc_s == read.forward_s
    assert read.backward_calc_s == read.backward_s
    assert read.parameter_bytes == 4 * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN)


def test_a_split_layer_also_communicates(pair: LocalProber) -> None:
    for split in (False, True):
        read = reading(pair, tp=2, sequence_parallel=split)
        assert 0 < read.forward_calc_s < read.forward_s
        assert 0 < read.backward_calc_s < read.backward_s
        assert read.parameter_bytes == 4 * (2 * HIDDEN**2 + 3 * HIDDEN * FFN // 2 + 2 * HIDDEN)


def test_full_recomputation_keeps_the_output_only(pair: LocalProber) -> None:
    assert reading(pair, recompute="full").saved_bytes == STATE_BYTES
    assert reading(pair, recompute="full", tp=2, sequence_parallel=True).saved_bytes == STATE_BYTES // 2


def test_a_layer_keeps_the_tensors_that_its_backward_needs(pair: LocalProber) -> None:
    # In units of one hidden state. Two norms: what they give, before and after their weights (torch's RMSNorm on CPU is
    # made of simple operators). Attention: rotated query and key, value, context. The sum after attention. MLP: gate,
    # its SiLU, up and their product, each f/h wide. And the layer's output; its input is older and not counted.
    units = 2 * 2 + 4 + 1 + 4 * FFN / HIDDEN + 1
    read = reading(pair)
    # Beside these a few floats a token: 1/rms of two norms and the logarithms of the attention's sums.
    assert units * STATE_BYTES <= read.saved_bytes <= (units + 0.1) * STATE_BYTES
    assert read.peak_bytes > read.saved_bytes
    assert reading(pair, recompute="selective").saved_bytes < read.saved_bytes


def test_the_head_keeps_one_fp32_copy_of_the_logits(pair: LocalProber) -> None:
    read = reading(pair, part="head")
    logits_bytes = ROWS * LENGTH * VOCAB * 4
    assert logits_bytes + STATE_BYTES < read.saved_bytes < logits_bytes + 2.2 * STATE_BYTES
    split = reading(pair, part="head", tp=2)
    assert read.saved_bytes - split.saved_bytes == pytest.approx(logits_bytes // 2, abs=64)


def test_the_embedding_keeps_its_output(pair: LocalProber) -> None:
    read = reading(pair, part="embedding")
    assert read.saved_bytes == STATE_BYTES
    assert read.parameter_bytes == 4 * VOCAB * HIDDEN


def test_what_cannot_run_is_refused(pair: LocalProber) -> None:
    for changes, complaint in (
        ({"tp": 4}, "2 ranks"),
        ({"sequence_parallel": True}, "tp > 1"),
        ({"dtype": "fp8"}, "fp8"),
    ):
        outcome = pair.run(layer_request(**changes), deadline_s=AMPLE_S)
        assert outcome.failure is not None
        assert outcome.failure.kind is FailureKind.ILLEGAL
        assert complaint in outcome.failure.message


def test_merging_takes_the_slowest_rank_of_each_iteration() -> None:
    def report(forward_s: list[float], share: float) -> dict[str, Any]:
        figures = dict.fromkeys(("saved_bytes", "peak_bytes", "parameter_bytes"), int(share * 100))
        shares = {"forward_exposed_share": share, "backward_exposed_share": share}
        return {"forward_s": forward_s, "backward_s": [1.0, 1.0, 1.0], "memory_source": "test", **shares, **figures}

    (read,) = merge_layer(layer_request(tp=2), {0: report([1.0, 5.0, 2.0], 0.5), 1: report([3.0, 1.0, 1.0], 0.25)})
    assert read.forward_s == 3.0
    assert read.forward_calc_s == 2.25  # the rank that waited least shows what communication itself takes
    assert read.saved_bytes == 50
