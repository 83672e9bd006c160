"""A plain training script under torchrun: FSDP2 over dp and torch's pipelining over pp, on CPU (gloo) or GPUs (NCCL).

torchrun --nproc-per-node 2 train.py --pp 2 --micro-batch 2 --global-batch 16
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel


class Layer(nn.Module):
    """A transformer layer, pre-norm, with plain causal attention."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x has shape (sequences, tokens, hidden)."""
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(self, options: argparse.Namespace, stage: int) -> None:
        super().__init__()
        each = -(-options.layers // options.pp)
        count = min(each, options.layers - stage * each)
        self.embedding = nn.Embedding(options.vocab, options.hidden) if stage == 0 else None
        layers = (Layer(options.hidden, options.heads, options.ffn) for _ in range(count))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(options.hidden, options.vocab, bias=False) if stage == options.pp - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens on the first stage, activations on the others."""
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    """Trains on random tokens and prints a line a step."""
    parser = argparse.ArgumentParser()
    for name, default in {
        "pp": 1, "zero-stage": 0, "micro-batch": 1, "global-batch": 16, "seq-len": 128, "layers": 4, "hidden": 128,
        "heads": 4, "ffn": 512, "vocab": 1024, "steps": 10,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = world // options.pp
    mesh = init_device_mesh(device.type, (options.pp, dp), mesh_dim_names=("pp", "dp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    torch.manual_seed(stage)
    model: nn.Module = Stage(options, stage).to(device)
    if options.zero_stage == 3:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif dp > 1:
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    per_replica = options.global_batch // dp
    micro_batches = per_replica // options.micro_batch
    schedule = None
    if options.pp > 1:
        part = PipelineStage(model, stage, options.pp, device, group=mesh["pp"].get_group())
        kind = Schedule1F1B if options.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(part, n_microbatches=micro_batches, loss_fn=loss_of)

    torch.manual_seed(1000 + replica)
    for step in range(options.steps):
        tokens = torch.randint(0, options.vocab, (per_replica, options.seq_len + 1), device=device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        started = time.perf_counter()
        losses: list[torch.Tensor] = []
        if schedule is not None:
            if stage == 0:
                schedule.step(inputs)
            elif stage == options.pp - 1:
                schedule.step(target=targets, losses=losses)
            else:
                schedule.step()
        else:
            pairs = zip(inputs.split(options.micro_batch), targets.split(options.micro_batch), strict=True)
            for number, (chunk, wanted) in enumerate(pairs, start=1):
                replicated = isinstance(model, DistributedDataParallel)
                with model.no_sync() if replicated and number < micro_batches else contextlib.nullcontext():
                    loss = loss_of(model(chunk), wanted) / micro_batches
                    loss.backward()
                losses.append(loss.detach() * micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        took_ms = 1e3 * (time.perf_counter() - started)
        if rank == world - 1:  # the last stage has the loss
            print(f"step {step + 1} loss {torch.stack(losses).mean():.3f} {took_ms:.1f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
