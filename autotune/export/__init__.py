"""A plan as launch arguments of other frameworks, and as the command that measures it again here."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from autotune.errors import UnknownNameError
from autotune.export import deepspeed, megatron, nanotron, nemo, torchtitan, transformers
from autotune.export.arguments import ExportRequest, LaunchArguments, flags
from autotune.specs import ClusterSpec, ModelSpec, Plan, Workload

__all__ = ["LaunchArguments", "launch_arguments", "own_command", "plan_text", "targets"]

_EXPORTERS: dict[str, Callable[[ExportRequest], LaunchArguments]] = {
    each.NAME: each.export for each in (megatron, deepspeed, torchtitan, nemo, nanotron, transformers)
}


def targets() -> tuple[str, ...]:
    """The names of the frameworks that a plan can be exported to."""
    return tuple(_EXPORTERS)


def launch_arguments(
    target: str, model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan
) -> LaunchArguments:
    """How to train `model` under `plan` with the framework `target`.

    Raises:
        UnknownNameError: a target that is not one of `targets()`.
        IllegalPlanError: a plan that does not suit the cluster and workload, or that the target cannot express.
    """
    name, _, version = target.partition("@")
    if name not in _EXPORTERS:
        raise UnknownNameError("target", target, targets())
    run = ExportRequest(model=model, cluster=cluster, workload=workload, plan=plan)
    run.check()
    return _EXPORTERS[name](run, version) if version else _EXPORTERS[name](run)


def own_command(model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan) -> str:
    """The shell command that runs the plan's step probe once more.

    Model and cluster are named: both must be presets, shorthands or stored in the database (a tuning stores its own).
    """
    options = {
        "--model": model.name,
        "--cluster": cluster.name,
        "--seq-len": str(workload.seq_len),
        "--global-batch": str(workload.global_batch),
        "--dtype": workload.dtype.value,
        "--precision": ",".join(f"{name}={value}" for name, value in workload.choices.items()) or None,
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
