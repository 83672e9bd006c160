"""Reading a Hugging Face config.json key by key, so that no key is overlooked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from autotune.errors import InputError, UnsupportedModelError

# Keys that change neither a shape nor the work of a training step: bookkeeping, generation, initialisation,
# regularisation, rotary angles, and how an expert is chosen (not how many). Of others like them see _HARMLESS_NAME.
_HARMLESS = frozenset(
    """
    _commit_hash _name_or_path _num_labels architectures attribute_map auto_map dtype id2label is_decoder label2id
    model_type name_or_path problem_type task_specific_params tokenizer_class torch_dtype transformers_version
    use_return_dict return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    torchscript chunk_size_feed_forward ignore_index num_labels tie_encoder_decoder pruned_heads prefix
    use_cache do_sample early_stopping max_length min_length model_max_length max_sequence_length n_ctx seq_length
    num_beams num_beam_groups num_return_sequences length_penalty diversity_penalty repetition_penalty
    encoder_no_repeat_ngram_size no_repeat_ngram_size remove_invalid_values top_k top_p typical_p num_logits_to_keep
    original_max_position_embeddings initial_context_length n_special output_past predict_special_tokens
    scale_attn_weights reorder_and_upcast_attn pretraining_tp residual_in_fp32 rescale_prenorm_residual
    output_router_logits norm_topk_prob aux_loss_alpha seq_aux scoring_func topk_method ep_size
    is_llama_config use_bfloat16 moe_router_scaling_factor cache_implementation use_routing_bias
    """.split()  # noqa: SIM905 (a list of a hundred literals is not easier to read)
)

# How configs name such keys, whatever else the name says.
_HARMLESS_NAME = re.compile(
    r"""
    .*(drop(out)?|_prob|eps(ilon)?|_std|_coef|_loss|_token_(id|index)|_dtype|_version|_temperature|softcap(ping)?
       |_scal(e|ing)|_scaling_factor|_theta|_implementation|initializer_range|_limit|_floor)
    | (rope|rotary|partial_rotary|initializer|init|router_jitter|tokenizer|summary|unsloth|use_flash|swiglu).*
    """,
    re.VERBOSE,
)

# What configs call shapes, parts and counts. A key with such a word is refused if nobody reads it.
_SHAPE = re.compile(
    "size|dim|width|head|layer|expert|window|rank|lora|ffn|hidden|intermediate|hybrid|pattern|attention|attn|conv"
    "|chunk|kernel|topk|sparse|mtp|nextn|ssm|mamba|linear|bias|parallel|encoder|decoder|cross|moe|mlp|norm|vision"
    "|audio|block|patch|gate|group|position|embed|alibi|compress|index|latent|mixer|depth|nope|proj|mult|expand"
    "|config"
)

_ACTIVATIONS = frozenset(
    {
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_python",
        "gelu_pytorch_tanh",
        "quick_gelu",
        "relu",
        "relu2",
    }
)

_REQUIRED = object()


class Fields:
    """The keys of one config. What is read is understood; `finish` refuses what nobody read.

    Args:
        data: the config.
        what: the config as the user knows it, for errors.
    """

    def __init__(self, data: dict[str, Any], what: str) -> None:
        self._data, self.what = data, what
        self._read: set[str] = set()

    def count(self, key: str, default: object = _REQUIRED, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`. An absent or null key is `default`, or an error without one."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(f"{self.what}: {key}", value, f"a whole number of at least {minimum} is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. An absent or null key is `default`."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.what}: {key}", value, "true or false is needed")
        return value

    def activation(self, key: str, default: str) -> None:
        """Accepts element-wise activations, which all cost the same; refuses others, which may change shapes."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise UnsupportedModelError(f"{self.what}: {key}", value, "understood: " + ", ".join(sorted(_ACTIVATIONS)))

    def only(self, key: str, allowed: Iterable[object], why: str) -> None:
        """Refuses a key whose value is none of `allowed`. An absent or null key is fine."""
        value = self._get(key, None)
        if value is not None and value not in tuple(allowed):
            raise UnsupportedModelError(f"{self.what}: {key}", value, why)

    def ignore(self, *keys: str) -> None:
        """Marks keys that the family's other keys make irrelevant."""
        self._read.update(keys)

    def finish(self) -> list[str]:
        """Refuses keys that nobody read and that name a shape; gives the others that are not known, to be told.

        A key that is null, false, 0 or empty turns nothing on.
        """
        unknown = []
        for key, value in self._data.items():
            if not value or key in self._read or key in _HARMLESS or _HARMLESS_NAME.fullmatch(key):
                continue
            if _SHAPE.search(key.lower()):
                raise UnsupportedModelError(
                    f"{self.what}: {key}", value, "this key is not understood, and it may change shapes or work"
                )
            unknown.append(key)
        return unknown

    def has(self, key: str) -> bool:
        """Whether the key stands in the config, null included."""
        return key in self._data

    def value(self, key: str) -> object:
        """The raw value, None where it is absent."""
        return self._get(key, None)

    def _get(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self._data.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise InputError(f"{self.what}: {key}", None, "this key is missing")
        return default
