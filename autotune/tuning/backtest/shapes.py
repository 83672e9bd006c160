"""The model behind a row. A runs file has the dimensions; whether the MLP is gated and so on is found by counting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from autotune.cost.parameters import total_parameters
from autotune.specs import ModelSpec, Norm, Position
from autotune.specs.model import MOST_LAYERS
from autotune.tuning.backtest.cells import Cells

GPT2_VOCABULARY = 51_200
"""Taken where a row has no vocabulary: GPT-2's, padded as Megatron-LM does for tp up to 8."""

MOST_DEVIATION = 0.2
"""A row whose parameter count no variant comes this close to is something else than a dense decoder."""

ROUNDING = 0.005
"""Parameter counts are published with about three digits."""

BILLION = 1e9
Dims = tuple[int, int, int, int, int, int, int]


def model_of(cells: Cells) -> ModelSpec:
    """The variant of the row's dimensions whose parameter count is closest to params_b.

    Of several within ROUNDING the family's usual one is taken: Llama's head is untied, GPT's is tied. Without params_b
    an MLP of width 4 x hidden is taken as GPT's, another one as Llama's.

    Raises:
        InputError: dimensions that do not go together, or a parameter count far from every variant's.
    """
    heads = cells.count("heads")
    dims = (
        cells.count("layers", most=MOST_LAYERS), cells.count("hidden"), heads,
        cells.count("kv_heads", heads), cells.count("ffn"), cells.count("vocab", GPT2_VOCABULARY),
        cells.count("seq_len"),
    )  # fmt: skip
    if dims[1] % heads:
        raise cells.bad("heads", f"must divide hidden ({dims[1]})")
    if heads % dims[3]:
        raise cells.bad("kv_heads", f"must divide heads ({heads})")
    billions = cells.positive("params_b")
    name = cells.text("model_name", "unnamed")
    if not name.isprintable():
        raise cells.bad("model_name", "must have no control characters")
    model, deviation = _closest(name, dims, billions)
    if deviation > MOST_DEVIATION:
        counted = total_parameters(model) / BILLION
        raise cells.bad("params_b", f"these dimensions make a dense decoder of {counted:.3g} billion parameters")
    return model


@lru_cache(maxsize=1024)
def _closest(name: str, dims: Dims, billions: float | None) -> tuple[ModelSpec, float]:
    variants = list(_variants(name, dims))
    if billions is None:
        gated = dims[4] != 4 * dims[1]
        return next(item for item in variants if item.gated == gated), 0.0

    def deviation(model: ModelSpec) -> float:
        return abs(total_parameters(model) / (billions * BILLION) - 1.0)

    best = min(variants, key=lambda model: max(deviation(model), ROUNDING))
    return best, deviation(best)


def _variants(name: str, dims: Dims) -> Iterator[ModelSpec]:
    """Llama's family (gated, RMSNorm, rotary) and GPT's (ungated, LayerNorm, biases, learned positions).

    The usual one of a family comes first.
    """
    layers, hidden, heads, kv_heads, ffn, vocab, seq_len = dims
    for gated in (True, False):
        for tied in (not gated, gated):
            yield ModelSpec(
                name=name[:200],
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=hidden // heads,
                ffn=ffn,
                gated=gated,
                vocab=vocab,
                tied=tied,
                norm=Norm.RMSNORM if gated else Norm.LAYERNORM,
                position=Position.ROPE if gated else Position.LEARNED,
                max_positions=0 if gated else seq_len,
                linear_bias=not gated,
                source="runs file",
            )
