"""LaunchArguments: a plan in another framework's words, the files that run it, and what every exporter shares."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.errors import IllegalPlanError
from autotune.frameworks.table import Facts
from autotune.specs import ClusterSpec, ModelSpec, Plan, Workload


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What only the user knows, under a name, with words that stand in for it.

    Attributes:
        name: in capitals, as the script or the config has it.
        words: of the command, one after another, that stand in until the user gives theirs; () where it is a word of
            the config.
        about: what to put there.
    """

    name: str
    words: tuple[str, ...]
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """How to train under a plan with one framework.

    Attributes:
        target: the framework's name, one of `targets()`.
        version: of the framework, whose words these are.
        argv: the command and its arguments, one node's; NODE_RANK, MASTER_ADDR and the like are left to the launcher.
        environment: variables that the command needs.
        config_name: the file that the command reads, "" where there is none.
        config: the text of that file.
        beside: the texts of the other files that the command needs, by name.
        placeholders: what the user must still fill in; the words of it that `argv` has stand in for it.
        notes: what the framework does differently from our step probe, and what else there is to know.
    """

    target: str
    version: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    config_name: str = ""
    config: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    placeholders: tuple[Placeholder, ...] = ()
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, str]:
        """The text of each file by its name: the script that launches one node, and the config."""
        config = {self.config_name: self.config} if self.config_name else {}
        return {SCRIPT: _script(self), **config, **self.beside}

    def to_data(self) -> dict[str, Any]:
        """For --json and the API."""
        return asdict(self) | {"environment": dict(self.environment), "files": self.files()}


SCRIPT = "launch.sh"


def _script(launch: LaunchArguments) -> str:
    lines = [
        "#!/usr/bin/env bash",
        f"# One node's launch with {launch.target} {launch.version}, written by autotune.",
        *(f"# {note}" for note in launch.notes),
        "set -euo pipefail",
    ]
    if any("$MASTER_ADDR" in word for word in launch.argv):
        lines += [': "${MASTER_ADDR:?the address of the first node}" "${MASTER_PORT:=29500}"']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    argv = list(launch.argv)
    for each in launch.placeholders:
        lines += ["", f"# Yours: {each.about}"]
        if each.words:
            lines.append(f"{each.name}=({' '.join(map(_word, each.words))})")
            start = next(at for at in range(len(argv)) if tuple(argv[at : at + len(each.words)]) == each.words)
            argv[start : start + len(each.words)] = [f'"${{{each.name}[@]}}"']
        else:
            lines.append(f"# {each.name} in {launch.config_name}")
    lines += ["", *_wrapped([word if word.startswith('"${') else _word(word) for word in argv])]
    return "\n".join(lines) + "\n"


def _word(word: str) -> str:
    """A word as a shell takes it; the launcher's variables must reach it."""
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)


def _wrapped(words: list[str]) -> list[str]:
    """A command over several lines: each option with its values stays on one."""
    lines = [words[0]]
    for word in words[1:]:
        starts = word.startswith(("-", '"${')) or len(lines[-1]) + len(word) > 110
        if starts and len(lines[-1]) + len(word) > 80:
            lines.append("    " + word)
        else:
            lines[-1] += " " + word
    return [line + " \\" for line in lines[:-1]] + lines[-1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A plan with everything it is a plan for, and the framework's version; what an exporter gets."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan
    version: str

    @property
    def facts(self) -> Facts:
        """All fields of the model, its constants, the workload and the plan by name."""
        model: dict[str, Any] = self.model.to_data()
        constants: dict[str, Any] = model["constants"]
        return model | constants | self.workload.to_data() | self.plan.to_data()

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
        # On one node a port of its own: torchrun's default is one for the whole machine.
        alone = nodes == 1
        where = (
            ("--standalone",) if alone else ("--rdzv-backend", "c10d", "--rdzv-endpoint", "$MASTER_ADDR:$MASTER_PORT")
        )
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
