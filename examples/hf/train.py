"""A tiny Llama with Hugging Face's Trainer and DDP: torchrun --nproc-per-node 2 train.py --micro-batch 4 ..."""

from __future__ import annotations

import argparse
import tempfile

import torch
from autotune_callback import hf_callback  # autotune puts it there
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Random tokens, as many as are wanted."""

    def __init__(self, vocab: int, seq_len: int) -> None:
        self.vocab, self.seq_len = vocab, seq_len

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, (self.seq_len,))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Trains for so many steps."""
    parser = argparse.ArgumentParser()
    for name in ("micro-batch", "accumulation", "seq-len", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--model", required=True, help="a config.json")
    options = parser.parse_args()
    model = LlamaForCausalLM(LlamaConfig.from_json_file(options.model))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.accumulation,
            gradient_checkpointing=options.recompute == "full",
            max_steps=options.steps,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = Tokens(model.config.vocab_size, options.seq_len)
        Trainer(model, arguments, train_dataset=data, callbacks=[hf_callback()]).train()


if __name__ == "__main__":
    main()
