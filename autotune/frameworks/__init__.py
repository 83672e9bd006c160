"""A plan in the words of training frameworks, both ways: as a launch of theirs, and from one of theirs.

Each framework is a module with its NAME, the VERSIONS that it covers (newest first), `export` and `read`. One table of
settings serves both (`frameworks.table`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import InputError, UnknownNameError
from autotune.frameworks import deepspeed, megatron, nanotron, nemo, torchtitan, transformers
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, flags
from autotune.frameworks.reading import NOTHING, Given, ImportedPlan, Launch
from autotune.specs import ClusterSpec, FrameworkName, ModelSpec, Plan, Workload

__all__ = [
    "Given", "ImportedPlan", "LaunchArguments", "Target", "import_plan", "launch_arguments", "own_command",
    "plan_text", "record_of", "target_of", "targets",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Framework:
    versions: tuple[str, ...]
    export: Callable[[ExportRequest], LaunchArguments]
    read: Callable[[Launch, Given], ImportedPlan]


_FRAMEWORKS = {
    each.NAME: _Framework(versions=each.VERSIONS, export=each.export, read=each.read)
    for each in (megatron, deepspeed, torchtitan, nemo, nanotron, transformers)
}
_RECORDS = {
    "megatron": FrameworkName.MEGATRON, "nemo": FrameworkName.NEMO, "deepspeed": FrameworkName.DEEPSPEED,
    "torchtitan": FrameworkName.FSDP, "nanotron": FrameworkName.NANOTRON, "transformers": FrameworkName.FSDP,
}  # fmt: skip
_ALSO = {"megatron-lm": "megatron", "megatron-bridge": "nemo"}


@dataclass(frozen=True, slots=True)
class Target:
    """A framework and the version of it, as `NAME` or `NAME@VERSION` names it."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def targets() -> tuple[str, ...]:
    """The names of the frameworks that a plan can be exported to and read from."""
    return tuple(_FRAMEWORKS)


def record_of(name: str) -> FrameworkName:
    """Whose habits and rules a target has, by its name without a version: torch's where it has none of its own."""
    return _RECORDS.get(name, FrameworkName.TORCH)


def target_of(text: str) -> Target:
    """Reads NAME or NAME@VERSION; without a version it is the newest one that is covered. A patch level is dropped.

    Raises:
        UnknownNameError: a framework that is not one of `targets()`.
        InputError: a version that is not covered.
    """
    name, sign, version = text.partition("@")
    name = _ALSO.get(name, name)
    if name not in _FRAMEWORKS:
        raise UnknownNameError("target", text, targets())
    known = _FRAMEWORKS[name].versions
    if not sign:
        return Target(name, known[0])
    found = next((each for each in known if version == each or version.startswith(f"{each}.")), None)
    if found is None:
        raise InputError(f"version of {name}", version, "one of " + ", ".join(known))
    return Target(name, found)


def launch_arguments(
    target: str, model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan
) -> LaunchArguments:
    """How to train `model` under `plan` with a framework, named as `target_of` reads it.

    Raises:
        UnknownNameError: a target that is not one of `targets()`.
        IllegalPlanError: a plan that does not suit the cluster and workload, or that the target cannot express.
        InputError: a version that is not covered.
    """
    found = target_of(target)
    run = ExportRequest(model=model, cluster=cluster, workload=workload, plan=plan, version=found.version)
    run.check()
    return _FRAMEWORKS[found.name].export(run)


def import_plan(
    target: str, file: str, text: str, given: Given = NOTHING, beside: Callable[[str], str] | None = None
) -> ImportedPlan:
    """The model, workload and plan of a launch of somebody's.

    Args:
        target: the framework, as `target_of` reads it.
        file: the file's name, for errors.
        text: a launch script, a command line or a config of that framework.
        given: what the user says beside it.
        beside: reads a file that the launch names.

    Raises:
        UnknownNameError: a framework that is not one of `targets()`.
        InputError: what cannot be read or used, with its place, or what nothing states.
    """
    found = target_of(target)
    return _FRAMEWORKS[found.name].read(Launch(file=file, text=text, version=found.version, beside=beside), given)


def own_command(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan, program: str | None = None
) -> str:
    """The shell command that runs the plan's step probe, or the user's own program, once more.

    `program` is the file of that program where it is not one of the operator's, which the workload names.
    Model and cluster are named: both must be presets, shorthands or stored in the database (a tuning stores its own).
    """
    options = {
        "--model": model.name,
        "--cluster": cluster.name,
        "--seq-len": str(workload.seq_len),
        "--global-batch": str(workload.global_batch),
        "--dtype": workload.dtype.value,
        "--precision": ",".join(f"{name}={value}" for name, value in workload.choices.items()) or None,
        "--command": program or workload.command.partition("@")[0] or None,
        "--plan": plan_text(plan),
    }
    return shlex.join(["autotune", "probe", "step", *flags(options)])


def plan_text(plan: Plan) -> str:
    """The plan as `Plan.parse` reads it: tp, pp, dp, micro_batch, zero_stage, and what differs from the defaults."""
    always, defaults = ("tp", "pp", "dp", "micro_batch", "zero_stage"), Plan().to_data()
    data = plan.to_data()
    kept = {key: data[key] for key in always} | {key: value for key, value in data.items() if value != defaults[key]}
    if plan.vpp > 1:  # Plan.parse would otherwise assume the interleaved schedule
        kept["schedule"] = data["schedule"]
    if plan.recompute_modules:
        kept["recompute_modules"] = "+".join(plan.recompute_modules)
    return ",".join(f"{key}={str(value).lower()}" for key, value in kept.items())
