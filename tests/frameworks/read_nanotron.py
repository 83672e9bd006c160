"""What nanotron makes of a launch, without GPUs: its own config and the demands of its engines.

NANOTRON is the folder of its sources: it is in no package index. flash_attn, which its models import, is a stand-in.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any

import readers
import yaml


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.6.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in {"flash_attn", "ring_flash_attn", "grouped_gemm"}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, _Finder())
sys.path.insert(0, os.path.join(os.environ["NANOTRON"], "src"))

from nanotron.config import Config, get_config_from_dict  # noqa: E402
from nanotron.config.models_config import LlamaConfig  # noqa: E402
from nanotron.parallel.pipeline_parallel.engine import OneForwardOneBackwardPipelineEngine  # noqa: E402


def read(launch: dict[str, Any]) -> dict[str, Any]:
    argv = launch["argv"]
    with open(argv[argv.index("--config-file") + 1]) as file:
        config = get_config_from_dict(yaml.safe_load(file), config_class=Config)
    chosen, tokens, model = config.parallelism, config.tokens, config.model.model_config
    ranks = chosen.tp * chosen.pp * chosen.dp * chosen.context_parallel_size
    if ranks != launch["world"]:
        raise ValueError(f"TP*CP*DP*PP={ranks} != WORLD_SIZE={launch['world']}")
    eager = isinstance(chosen.pp_engine, OneForwardOneBackwardPipelineEngine)
    m = tokens.batch_accumulation_per_replica
    if eager and m < chosen.pp - 1:
        raise ValueError(f"Number of microbatches ({m}) must be at least PP_SIZE-1={chosen.pp - 1}")
    # Its configs of Llama are read as Qwen2's where they fit neither: the shapes have to be Llama's.
    assert isinstance(model, LlamaConfig), type(model)
    hidden, width = model.hidden_size, model.hidden_size // model.num_attention_heads
    matrices = hidden * width * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    layer = matrices + 3 * hidden * model.intermediate_size + 2 * hidden
    ends = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2) + hidden
    return {
        "parameters": model.num_hidden_layers * layer + ends, "seq_len": tokens.sequence_length,
        "global_batch": config.global_batch_size, "micro_batch": tokens.micro_batch_size, "micro_batches": m,
        "schedule": "1f1b" if eager else "gpipe", "tp": chosen.tp, "pp": chosen.pp, "dp": chosen.dp,
        "cp": chosen.context_parallel_size, "ep": chosen.expert_parallel_size, "zero": config.optimizer.zero_stage,
        "sequence_parallel": chosen.tp_mode.name == "REDUCE_SCATTER", "compute": readers.dtype_name(config.model.dtype),
        "recompute": "full" if chosen.recompute_layer else "none",
        "grads": "fp32" if config.optimizer.accumulate_grad_in_fp32 else readers.dtype_name(config.model.dtype),
        "optimizer": config.optimizer.optimizer_factory.name.lower(),
    }  # fmt: skip


if __name__ == "__main__":
    readers.main(read)
