"""The layer probe, on a rank: forward and backward of one part of the model, timed, traced and accounted for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.specs import LayerPart, LayerRequest, ProbeProgress
from probes.context import RankContext
from probes.ledger import growth_of, memory_source
from probes.mesh import axis, trial_groups
from probes.model import Stage
from probes.parallelize import TORCH_DTYPES, fill_weights
from probes.runnable import check_layer
from probes.tensor_parallel import Split, cross_entropy, split_stage
from probes.timing import align, synchronize
from probes.trace import Tracer


def run(request: LayerRequest, context: RankContext) -> dict[str, Any]:
    """Measures the part on all ranks at once and returns this rank's report for `merge_layer`.

    Parameters have the workload's dtype, as the computing copy has in training. What a training step does once for
    all micro-batches (optimizer, data parallelism) is no part of this.

    Raises:
        IllegalPlanError, InputError: the request cannot be run (on all ranks alike).
    """
    check_layer(request, context.world_size)
    device = context.device
    with trial_groups(device) as groups:
        part = _Part.make(request, device, axis(groups, request.tp, 1))
        total = request.warmup + request.iterations
        times_s = []
        for index in range(total):
            times_s.append(part.iterate(lambda work: _timed(work, device)))
            context.emit(ProbeProgress(phase="sweep", done=index + 1, total=total, seconds=sum(times_s[-1])))
        forward, backward = part.iterate(lambda work: _traced(work, device))
        saved = growth_of(device, part.forward_and_rest)
        whole = growth_of(device, part.forward_and_backward)
        report = {
            "forward_s": [forward_s for forward_s, _ in times_s[request.warmup :]],
            "backward_s": [backward_s for _, backward_s in times_s[request.warmup :]],
            "forward_exposed_share": forward,
            "backward_exposed_share": backward,
            "saved_bytes": saved.live_bytes,
            "peak_bytes": whole.peak_bytes,
            "parameter_bytes": sum(parameter.nbytes for parameter in part.stage.parameters()),
            "memory_source": memory_source(device),
        }
        del part
    return report


@dataclass(slots=True)
class _Part:
    """A stage of one layer, or of the embedding or head alone, with one micro-batch of input.

    `targets` is there for the head, whose output is the loss; `meeting` is what ranks exchange to meet.
    """

    stage: Stage
    group: dist.ProcessGroup | None
    inputs: Tensor
    targets: Tensor | None
    meeting: Tensor
    output: Tensor | None = None
    gradient: Tensor | None = None

    @classmethod
    def make(cls, request: LayerRequest, device: torch.device, group: dist.ProcessGroup | None) -> _Part:
        """Builds part and input on the device."""
        model, workload, part = request.model, request.workload, request.part
        with torch.device("meta"):
            stage = Stage(
                model,
                [0] if part is LayerPart.LAYER else [],
                first=part is LayerPart.EMBEDDING,
                last=part is LayerPart.HEAD,
                recompute=request.recompute,
                seq_len=workload.seq_len,
            )
        if group is not None:
            split_stage(stage, Split(group, request.sequence_parallel))
        fill_weights(stage, device, 0, group)
        dtype = TORCH_DTYPES[workload.dtype]
        stage.to(dtype)
        rows, length = request.micro_batch, workload.seq_len
        generator = torch.Generator(device).manual_seed(0)
        tokens = torch.randint(model.vocab, (rows, length), generator=generator, device=device)
        meeting = torch.zeros(1, device=device)
        if part is LayerPart.EMBEDDING:
            return cls(stage, group, tokens, None, meeting)
        local_length = length // request.tp if request.sequence_parallel else length
        hidden = torch.randn(rows, local_length, model.hidden, generator=generator, device=device).to(dtype)
        return cls(stage, group, hidden.requires_grad_(), tokens if part is LayerPart.HEAD else None, meeting)

    def forward(self) -> Tensor:
        """The part's output, or the loss."""
        output: Tensor = self.stage(self.inputs)
        return output if self.targets is None else cross_entropy(output, self.targets, self.group)

    def backward(self, output: Tensor) -> None:
        """Gradients of parameters and input, from a gradient of ones made beforehand."""
        output.backward(self.gradient)  # type: ignore[no-untyped-call]

    def forward_and_backward(self) -> None:
        """Both, and nothing kept but the gradients."""
        self.backward(self.forward())

    def forward_and_rest(self) -> Tensor:
        """The output, after the threads that communicate have let go of what they held."""
        output = self.forward()
        dist.all_reduce(self.meeting)
        return output

    def iterate(self, observe: Callable[[Callable[[], None]], float]) -> tuple[float, float]:
        """One forward and one backward, each observed; gradients are dropped afterwards."""
        forward = observe(self._keep_forward)
        if self.gradient is None and self.output is not None:
            self.gradient = torch.ones_like(self.output)
        backward = observe(self._drop_backward)
        self.clear()
        return forward, backward

    def clear(self) -> None:
        """Drops all gradients."""
        self.stage.zero_grad(set_to_none=True)
        self.inputs.grad = None

    def _keep_forward(self) -> None:
        self.output = self.forward()

    def _drop_backward(self) -> None:
        output, self.output = self.output, None
        if output is not None:
            self.backward(output)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of `work`, begun by all ranks together."""
    align(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s


def _traced(work: Callable[[], None], device: torch.device) -> float:
    """The share of `work`'s time that is communication with no computation under it."""
    align(device)
    with Tracer(cuda=device.type == "cuda") as tracer:
        start_s = time.perf_counter()
        work()
        synchronize(device)
        elapsed_s = time.perf_counter() - start_s
    return min(1.0, tracer.read().exposed_s / elapsed_s)
