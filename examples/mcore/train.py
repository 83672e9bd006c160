"""A tiny GPT with megatron-core: torchrun --nproc-per-node 2 train.py --tp 2 ... On CPU ranks through cpu_shim.py."""

from __future__ import annotations

import argparse

import cpu_shim  # noqa: F401 - before megatron-core, which asks torch.cuda for "this rank's device"
import torch
import torch.distributed as dist
from autotune_callback import StepTimer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import random as tensor_random
from megatron.core.transformer.transformer_config import TransformerConfig


def main() -> None:
    """Trains on random tokens."""
    parser = argparse.ArgumentParser()
    for name in (
        "tp", "pp", "vpp", "micro-batch", "global-batch", "seq-len", "layers", "hidden", "heads", "kv-heads", "ffn",
        "vocab", "zero-stage", "steps",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    vpp = options.vpp if options.vpp > 1 else None
    parallel_state.initialize_model_parallel(options.tp, options.pp, vpp)
    tensor_random.initialize_rng_tracker()
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden, num_attention_heads=options.heads,
        num_query_groups=options.kv_heads, ffn_hidden_size=options.ffn, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        bias_activation_fusion=False, apply_rope_fusion=False, tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp, virtual_pipeline_model_parallel_size=vpp, attention_dropout=0.0,
        hidden_dropout=0.0, use_cpu_initialization=True, pipeline_dtype=torch.float32, params_dtype=torch.float32,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads

    def chunk(number: int) -> GPTModel:
        place = {"ignore_virtual": False, "vp_stage": number} if vpp else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=options.vocab,
            max_sequence_length=options.seq_len,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=False,
            **({"vp_stage": number} if vpp else {}),
        )
        model.model_type = ModelType.encoder_or_decoder
        return model

    sharded = options.zero_stage > 0
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    chunks = [DistributedDataParallel(config, reduction, chunk(number)) for number in range(options.vpp)]
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, clip_grad=0.0, use_distributed_optimizer=sharded, params_dtype=torch.float32
    )
    optimizer = get_megatron_optimizer(adam, chunks)
    mask = torch.triu(torch.ones(1, 1, options.seq_len, options.seq_len, dtype=torch.bool), 1)

    def forward(_: object, model: DistributedDataParallel) -> tuple[torch.Tensor, object]:
        tokens = torch.randint(0, options.vocab, (options.micro_batch, options.seq_len))
        positions = torch.arange(options.seq_len).expand_as(tokens)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return model(tokens, positions, mask, labels=tokens), loss

    replicas = parallel_state.get_data_parallel_world_size()
    run, timer = get_forward_backward_func(), StepTimer()
    for _ in range(options.steps):
        for each in chunks:
            each.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=[None] * options.vpp if vpp else None,
            model=chunks if vpp else chunks[0],
            num_microbatches=options.global_batch // (replicas * options.micro_batch),
            seq_length=options.seq_len,
            micro_batch_size=options.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        timer.step()


if __name__ == "__main__":
    main()
