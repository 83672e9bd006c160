"""A tiny Llama under DeepSpeed (ZeRO 0 to 3, AutoTP), or a stack of layers in its pipeline, on CPU or GPUs.

torchrun --nproc-per-node 2 train.py --deepspeed_config ds.json --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils.logging import set_log_level_from_string
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class Layer(nn.Module):
    """A layer of the pipelined model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, config.num_attention_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x has shape (sequences, tokens, hidden)."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def pipelined(config: LlamaConfig, stages: int) -> PipelineModule:
    """As many layers as the config has, in that many stages."""

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    layers = [
        LayerSpec(nn.Embedding, config.vocab_size, config.hidden_size),
        *(LayerSpec(Layer, config) for _ in range(config.num_hidden_layers)),
        LayerSpec(nn.Linear, config.hidden_size, config.vocab_size),
    ]
    return PipelineModule(layers=layers, num_stages=stages, loss_fn=loss, partition_method="uniform")


def main() -> None:
    """Trains on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--model", required=True, help="a config.json")
    for name in ("pp", "steps", "seq-len"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = deepspeed.add_config_arguments(parser).parse_args()
    told = json.loads(Path(options.deepspeed_config).read_text())
    micro_batch, accumulation = told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]
    tp = told.get("tensor_parallel", {}).get("autotp_size", 1)
    torch.set_num_threads(1)
    set_log_level_from_string("info")  # else it says only warnings, and nothing of its speed
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    config = LlamaConfig.from_json_file(options.model)
    model = pipelined(config, options.pp) if options.pp > 1 else LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(args=options, model=model, optimizer=optimizer)
    rank = torch.distributed.get_rank()

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            tokens = torch.randint(0, config.vocab_size, (micro_batch, options.seq_len), device=engine.device)
            if tp > 1:  # its ranks train the same tokens
                torch.distributed.broadcast(tokens, rank // tp * tp, engine.mpu.get_tensor_model_parallel_group())
            yield tokens, tokens

    data = batches()
    for _ in range(options.steps):
        if options.pp > 1:
            engine.train_batch(data)
            continue
        for _ in range(accumulation):
            tokens, _ = next(data)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()


if __name__ == "__main__":
    main()
