"""A plain decoder-only transformer from a ModelSpec, cut into pipeline stages. No parallelism in here.

Attention is torch's scaled_dot_product_attention (causal), which picks a fused kernel that keeps no s*s scores.
Modules are named so that a parameter has the same global name on whatever stage it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune.specs import ModelSpec, Norm, Position, Recompute

# Non-reentrant recomputation, without saving random state: the model draws no random numbers.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Rotary(nn.Module):
    """Rotary position tables (Su et al. 2021, arXiv:2104.09864), base 10000, rotating halves as Llama does."""

    def __init__(self, seq_len: int, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:  # a head of 3 would be rotated as one of 4, and nothing would say so
            raise ValueError(f"head_dim {head_dim} has no halves to rotate")
        self.seq_len, self.head_dim = seq_len, head_dim
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(seq_len, 1, head_dim // 2), persistent=False)

    def fill(self) -> None:
        """Writes the tables; needed after `to_empty`."""
        device = self.get_buffer("cosine").device
        steps = torch.arange(0, self.head_dim // 2, device=device) * 2 / self.head_dim
        angles = torch.outer(torch.arange(self.seq_len, device=device).float(), 10000.0**-steps)
        self.get_buffer("cosine").copy_(angles.cos().unsqueeze(1))
        self.get_buffer("sine").copy_(angles.sin().unsqueeze(1))

    def forward(self, heads: Tensor) -> Tensor:
        """Rotates (batch, sequence, heads, head_dim)."""
        first, second = heads.chunk(2, dim=-1)
        cosine, sine = self.get_buffer("cosine").to(heads.dtype), self.get_buffer("sine").to(heads.dtype)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Positions(nn.Module):
    """Learned positions, (max_positions, hidden), added to the embeddings."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden))
        self.part, self.parts = 0, 1  # which part of the sequence is here, of how many

    def forward(self, hidden: Tensor) -> Tensor:
        """Adds this part's rows to (batch, sequence / parts, hidden)."""
        length = hidden.size(1)
        return hidden + self.weight[self.part * length : (self.part + 1) * length]


class Projection(nn.Linear):
    """The matrix that ends attention or MLP. Where it is split, `join` sums the products before the bias."""

    join: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if self.join is None:
            return super().forward(input)
        joined = self.join(functional.linear(input, self.weight))
        return joined if self.bias is None else joined + self.bias


class Attention(nn.Module):
    """Grouped-query causal attention on the heads that this rank holds."""

    def __init__(self, spec: ModelSpec, rotary: Rotary | None, recompute: Recompute) -> None:
        super().__init__()
        bias = spec.linear_bias or spec.qkv_bias
        self.head_dim, self.rotary, self.selective = spec.head_dim, rotary, recompute is Recompute.SELECTIVE
        self.query = nn.Linear(spec.hidden, spec.heads * spec.head_dim, bias=bias)
        self.key = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=bias)
        self.value = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=bias)
        self.output = Projection(spec.heads * spec.head_dim, spec.hidden, bias=spec.linear_bias)
        self.query_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.key_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        query, key = self._heads(self.query(hidden)), self._heads(self.key(hidden))
        value = self._heads(self.value(hidden))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        context = recomputed(attend, query, key, value) if self.selective else attend(query, key, value)
        return self.output(context)  # type: ignore[no-any-return]

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The attention core on (batch, sequence, heads, head_dim), to (batch, sequence, heads * head_dim)."""
    grouped = query.size(2) != key.size(2)
    heads = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=grouped
    )
    return heads.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """A gated (SiLU, three matrices) or plain (GELU, two matrices) MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=spec.linear_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=spec.linear_bias)
        self.down = Projection(spec.ffn, spec.hidden, bias=spec.linear_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(hidden)))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A pre-norm transformer layer. With full recomputation only its input outlives the forward pass."""

    def __init__(self, spec: ModelSpec, rotary: Rotary | None, recompute: Recompute) -> None:
        super().__init__()
        self.full = recompute is Recompute.FULL
        self.attention_norm, self.mlp_norm = make_norm(spec, spec.hidden), make_norm(spec, spec.hidden)
        self.attention, self.mlp = Attention(spec, rotary, recompute), Mlp(spec)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        return recomputed(self._body, hidden) if self.full else self._body(hidden)

    def _body(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """The layers `layers` of the model; with the embedding if `first`, with final norm and head if `last`.

    Args:
        spec: a dense model.
        layers: global indices of the layers that live here.
        first: takes token ids (batch, sequence) instead of hidden states.
        last: gives logits (batch, sequence, vocab) instead of hidden states.
        recompute: what is recomputed in backward.
        seq_len: tokens of a sequence, for the rotary tables.
    """

    def __init__(
        self, spec: ModelSpec, layers: Sequence[int], *, first: bool, last: bool, recompute: Recompute, seq_len: int
    ) -> None:
        super().__init__()
        rotary = Rotary(seq_len, spec.head_dim) if spec.position is Position.ROPE else None
        learned = first and spec.position is Position.LEARNED
        self.tied = spec.tied
        self.split_dims: dict[str, int] = {}  # by parameter name, filled by tensor parallelism
        self.partial_names: set[str] = set()
        self.embedding = nn.Embedding(spec.vocab, spec.hidden) if first else None
        self.positions = Positions(spec.max_positions, spec.hidden) if learned else None
        self.layers = nn.ModuleDict({str(index): Layer(spec, rotary, recompute) for index in layers})
        self.norm = make_norm(spec, spec.hidden) if last else None
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if last else None
        self.tie()

    def tie(self) -> None:
        """Makes head and embedding one parameter where both live here and the model ties them."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids or hidden states in, hidden states or logits out."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        if self.positions is not None:
            hidden = self.positions(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def make_norm(spec: ModelSpec, width: int) -> nn.Module:
    """The model's normalisation over the last `width` elements."""
    return nn.RMSNorm(width, eps=1e-6) if spec.norm is Norm.RMSNORM else nn.LayerNorm(width)
