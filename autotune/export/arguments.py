"""LaunchArguments: a plan in another framework's words, and what every exporter shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autotune.errors import IllegalPlanError
from autotune.specs import ClusterSpec, ModelSpec, Plan, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """How to train under a plan with one framework.

    Attributes:
        target: the framework's name, one of `targets()`.
        argv: the command and its arguments, one node's; NODE_RANK, MASTER_ADDR and the like are left to the launcher.
        config_name: the file that the command reads, "" where there is none.
        config: the text of that file.
        files: every file that the command needs, by name.
        notes: what the user must still fill in, and what the framework does differently from our step probe.
    """

    target: str
    argv: tuple[str, ...]
    config_name: str = ""
    config: str = ""
    files: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A plan with everything it is a plan for; what an exporter gets."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step of one pipeline: m = B / (dp * micro_batch)."""
        return self.workload.global_batch // (self.plan.dp * self.plan.micro_batch)

    def check(self) -> None:
        """Raises IllegalPlanError if the plan does not use the cluster's devices or divide the batch."""
        plan, batch = self.plan, self.workload.global_batch
        if plan.world_size != self.cluster.devices:
            raise IllegalPlanError(
                "plan", plan.key, f"it needs {plan.world_size} devices, the cluster has {self.cluster.devices}"
            )
        if batch % (plan.dp * plan.micro_batch):
            raise IllegalPlanError(
                "plan", plan.key, f"the global batch of {batch} must be a multiple of dp * micro_batch"
            )

    def torchrun(self) -> tuple[str, ...]:
        """The start of a command that torchrun runs on every node."""
        nodes = self.cluster.nodes
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "$MASTER_ADDR:$MASTER_PORT") if nodes > 1 else ()
        return ("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(self.cluster.gpus_per_node), *where)


def refuse(target: str, run: ExportRequest, reasons: Iterable[tuple[bool, str]]) -> None:
    """Raises IllegalPlanError with the first reason that holds: the target has no words for this plan."""
    alike = "the export covers models whose layers are all full attention and an MLP, with two norms"
    for holds, reason in (*reasons, (not run.model.uniform and target != "deepspeed", alike)):
        if holds:
            raise IllegalPlanError(f"{target}: plan", run.plan.key, reason)


def refuse_choices(target: str, run: ExportRequest, **more: Collection[str]) -> None:
    """Raises IllegalPlanError for number formats and kernels of the workload that the target has no words for.

    Args:
        target: named in the error.
        run: whose workload.
        more: what the target can say beyond torch's usual mixed precision, by field of the workload.
    """
    dtype = run.workload.dtype.value
    usual: dict[str, Collection[str]] = {
        "grad_dtype": ("fp32",), "reduce_dtype": (run.workload.gradients.value,), "param_dtype": (dtype,),
        "master_dtype": ("fp32",), "exp_avg_dtype": ("fp32",), "exp_avg_sq_dtype": ("fp32",), "saved_dtype": (dtype,),
        "cross_entropy": ("eager",),
    }  # fmt: skip
    said = dict(run.workload.choices)
    if run.workload.cross_entropy is not None:
        said["cross_entropy"] = run.workload.cross_entropy.value
    for name, value in said.items():
        allowed = more.get(name, usual.get(name, ()))
        if value not in allowed:
            what = f"of {name} it has {', '.join(allowed)}" if allowed else f"{name} cannot be said to it"
            raise IllegalPlanError(f"{target}: workload.{name}", value, what)


def flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """Command-line arguments from names and values: True is the bare flag, False, None and () leave it out."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif isinstance(value, tuple):
            words += [name, *value] if value else []
        elif value is not False and value is not None:
            words += [name, str(value)]
    return tuple(words)
