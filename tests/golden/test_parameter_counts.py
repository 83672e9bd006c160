"""Parameter counts, exact, against the figures that the checkpoints have."""

from __future__ import annotations

import pytest

from autotune.catalog import model
from autotune.cost.parameters import active_parameters, layer_counts, layer_parameters, total_parameters
from autotune.cost.work import full_square_flops_per_token, matmul_parameters, model_flops_per_token


# Source: the safetensors index of each repository on Hugging Face (model.safetensors.index.json, total size / dtype).
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("deepseek-v2-lite", 15_706_484_224),
        # The checkpoint has 256 routing biases in each of 58 layers beside this; they are not trained by gradient.
        ("deepseek-v3", 671_026_419_200 - 58 * 256),
    ],
)
def test_total_is_that_of_the_checkpoint(name: str, expected: int) -> None:
    assert total_parameters(model(name)) == expected


def test_gpt3_follows_the_published_formula() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), equation 2: 12·l·h²·(1 + 13/(12h) + (V+s)/(12lh)) + final norm."""
    spec = model("gpt3-175b")
    layers, h, v, s = spec.layers, spec.hidden, spec.vocab, spec.max_positions
    assert total_parameters(spec) == 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h
    assert round(total_parameters(spec) / 1e9) == 175


def test_active_parameters_of_mixtral() -> None:
    """Mixtral of Experts (arXiv:2401.04088): 47B parameters, 13B active."""
    spec = model("mixtral-8x7b")
    assert round(active_parameters(spec) / 1e9) == 13
    assert active_parameters(model("llama3-8b")) == total_parameters(model("llama3-8b"))


def test_deepseek_active_parameters() -> None:
    """DeepSeek-V3 (arXiv:2412.19437): 671B in total, 37B active, its own count leaving out the embedding."""
    spec = model("deepseek-v3")
    assert round((active_parameters(spec) - spec.vocab * spec.hidden) / 1e9) == 37
    assert layer_counts(spec) == (3, 58)
    assert layer_parameters(spec, moe=True).experts == 256 * 3 * 7168 * 2048


def test_flops_of_gpt3_in_the_published_convention() -> None:
    """Narayanan et al. 2021, equation 3 less recomputation: 72·B·s·l·h²·(1 + s/(6h) + V/(12lh)), the full s²."""
    spec, s = model("gpt3-175b"), 2048
    layers, h = spec.layers, spec.hidden
    published = 72 * layers * h * h * (1 + s / (6 * h) + spec.vocab / (12 * layers * h))
    assert full_square_flops_per_token(spec, s) == pytest.approx(published, rel=1e-12)


def test_causal_flops_count_half_of_attention() -> None:
    spec, s = model("llama3-8b"), 8192
    attention = full_square_flops_per_token(spec, s) - 6 * matmul_parameters(spec)
    assert attention == 12 * spec.layers * s * spec.heads * spec.head_dim
    assert model_flops_per_token(spec, s) == 6 * matmul_parameters(spec) + attention / 2
