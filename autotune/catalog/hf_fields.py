"""Reading a Hugging Face config.json key by key, so that no key is overlooked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.errors import InputError, UnsupportedModelError

# Keys that change neither a shape nor the work of a training step: bookkeeping, generation, initialisation,
# regularisation, rotary angles, and how an expert is chosen (not how many).
_HARMLESS = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path architectures attribute_map auto_map dtype id2label label2id
    model_type name_or_path problem_type task_specific_params tokenizer_class torch_dtype transformers_version
    use_return_dict return_dict output_attentions output_hidden_states torchscript chunk_size_feed_forward
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id use_cache do_sample
    max_length min_length n_ctx summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj is_decoder
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout classifier_dropout
    rms_norm_eps layer_norm_eps layer_norm_epsilon scale_attn_weights pretraining_tp
    rope_parameters rope_scaling rope_theta rope_interleave rotary_emb_base rotary_pct partial_rotary_factor
    router_aux_loss_coef router_jitter_noise output_router_logits norm_topk_prob aux_loss_alpha seq_aux
    scoring_func topk_method topk_group n_group routed_scaling_factor ep_size
    """.split()  # noqa: SIM905 (a list of seventy literals is not easier to read)
)

_ACTIVATIONS = frozenset(
    {"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "relu"}
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

    def finish(self) -> None:
        """Refuses keys that nobody read. A key that is null or false turns nothing on and is accepted."""
        for key, value in self._data.items():
            if key not in self._read and key not in _HARMLESS and value is not None and value is not False:
                raise UnsupportedModelError(f"{self.what}: {key}", value, "this key is not understood")

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
