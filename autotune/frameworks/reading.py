"""From the facts of somebody's launch to a model, a workload and a plan, and what could not be said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.catalog import models
from autotune.errors import InputError
from autotune.frameworks.table import Remainder, Why
from autotune.specs import Constants, ModelSpec, Plan, Workload
from autotune.specs.documents import parse_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is to be imported.

    Args:
        file: its name, for errors; "-" is standard input.
        text: its content.
        version: of the framework.
        beside: reads a file that the launch names, as seen from its folder; None where none can be read.
    """

    file: str
    text: str
    version: str
    beside: Callable[[str], str] | None = None

    def other(self, name: str) -> str:
        """The text of a file that the launch names. Raises InputError where there is none."""
        if self.beside is None:
            raise InputError(self.file, name, "it names this file, which is not at hand: give that one")
        return self.beside(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user says beside the file.

    Args:
        model: what is trained; None takes the shape that the file states.
        devices: of the whole run; None takes what the launcher's options in the file state.
        facts: of a workload or plan, by name, that the file does not state.
        variables: values of the variables that the file expects from its environment.
    """

    model: ModelSpec | None = None
    devices: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


NOTHING = Given()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPlan:
    """What a launch of somebody's trains, and how.

    Args:
        framework: its name.
        version: whose words were read.
        file: where from.
        model: what is trained.
        devices: of the whole run.
        gpus_per_node: None where nothing states it.
        workload: how it is trained.
        plan: how it is divided.
        remainder: settings that the plan does not say, by name.
        assumed: what nothing states, and what was taken for it.
        environment: the variables that the launch sets.
    """

    framework: str
    version: str
    file: str
    model: ModelSpec
    devices: int
    gpus_per_node: int | None
    workload: Workload
    plan: Plan
    remainder: tuple[Remainder, ...] = ()
    assumed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the plan says all of it."""
        return not self.remainder

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "framework": self.framework,
            "version": self.version,
            "file": self.file,
            "model": self.model.to_data(),
            "devices": self.devices,
            "gpus_per_node": self.gpus_per_node,
            "workload": self.workload.to_data(),
            "plan": self.plan.to_data(),
            "exact": self.exact,
            "remainder": [
                {"name": each.name, "value": each.value, "where": each.where, "why": each.why.value, "what": each.what}
                for each in self.remainder
            ],
            "assumed": list(self.assumed),
            "environment": dict(self.environment),
        }


def document_of(launch: Launch) -> dict[str, Any] | None:
    """The mapping of a YAML or JSON text, None where it is not one by its name or its beginning. Raises InputError."""
    beginning = next((line for line in launch.text.splitlines() if line.strip() and not line.startswith("#")), "")
    named = launch.file.lower().endswith((".yaml", ".yml", ".json"))
    if not named and re.match(r"\s*\{|[\w.]+:(\s|$)", beginning) is None:
        return None
    found = parse_document(launch.text, launch.file)
    if not isinstance(found, dict):
        raise InputError(launch.file, type(found).__name__, "a mapping of settings is needed")
    return found


OPTION = {"seq_len": "--seq-len", "global_batch": "--global-batch", "dtype": "--dtype"}
_CHECKED = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "tied", "experts", "top_k",
            "expert_ffn", "norm", "position")  # fmt: skip
_SHAPE = ("layers", "hidden", "heads", "ffn", "vocab", "gated", "tied", "norm", "position")


def assembled(
    launch: Launch,
    given: Given,
    facts: Mapping[str, Any],
    *,
    framework: str,
    devices: int | None,
    gpus_per_node: int | None = None,
    remainder: Sequence[Remainder] = (),
    assumed: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ImportedPlan:
    """The records of these facts.

    Args:
        launch: where they are from.
        given: what the user says beside it; it must agree with the facts.
        facts: by the names of ModelSpec, Constants, Workload and Plan; a missing dp is what the devices leave.
            `experts_tp`, the ranks of an expert, and `micro_batches` of a step may stand for etp and global_batch.
        framework: its name, also that of the workload's unless the facts have one.
        devices: that the file states.
        gpus_per_node: that the file states.
        remainder: settings that no fact says.
        assumed: what was taken for granted, in words.
        environment: variables that the launch sets.

    Raises:
        InputError: something that is needed is stated nowhere, or the file and the user disagree.
    """
    found = {**facts}
    for name, value in given.facts.items():
        if name in facts and facts[name] is not None and facts[name] != value:
            raise InputError(launch.file, facts[name], f"{OPTION.get(name, name)} says {value!r}, the file otherwise")
        found[name] = value
    if given.devices is not None and devices is not None and given.devices != devices:
        raise InputError(launch.file, devices, f"--devices says {given.devices}, the file another number")
    devices = given.devices or devices
    model, told = _model(launch, given, found)
    plan, devices = _plan(launch, found, devices)
    workload = _workload(launch, found, plan)
    return ImportedPlan(
        framework=framework, version=launch.version, file=launch.file, model=model, devices=devices,
        gpus_per_node=gpus_per_node, workload=workload, plan=plan, assumed=(*assumed, *told),
        remainder=tuple(sorted(remainder, key=lambda each: (each.why is Why.UNKNOWN, each.name))),
        environment=environment or {},
    )  # fmt: skip


def _model(launch: Launch, given: Given, facts: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
    data = {name: value for name, value in facts.items() if name in ModelSpec.model_fields and value is not None}
    if given.model is not None:
        for name in _CHECKED:
            ours = given.model.to_data()[name]
            if name in data and data[name] != ours:
                allowed = f"--model {given.model.name} has {name}={ours}, the file {data[name]}"
                raise InputError(f"{launch.file}: {name}", data[name], allowed)
        return given.model, []
    constants = {name: facts[name] for name in Constants.model_fields if facts.get(name) is not None}
    if "vocab" not in data and all(name in data for name in _SHAPE if name != "vocab"):
        shape = ModelSpec.from_data({"name": "unnamed", "vocab": 1, **data}, launch.file)
        if (known := next((each for each in models() if _same(each, shape)), None)) is not None:
            return known, [f"the model is {known.name} with its vocabulary of {known.vocab}"]
    missing = [name for name in _SHAPE if name not in data]
    if missing:
        allowed = f"the file does not state {', '.join(missing)} of its model: give --model"
        raise InputError(launch.file, None, allowed)
    data = {"name": f"{data['layers']}x{data['hidden']}", "source": launch.file, "constants": constants, **data}
    found = ModelSpec.from_data(data, launch.file)
    known = next((each for each in models() if _same(each, found)), None)
    if known is None:
        return found, []
    told = [] if known.vocab == found.vocab else [f"the model is {known.name} with a vocabulary of {found.vocab}"]
    return found.model_copy(update={"name": known.name, "source": known.source}), told


def _same(known: ModelSpec, found: ModelSpec) -> bool:
    """Whether these are shapes of one model; what the file leaves out (a vocabulary, a capacity) may differ."""
    free = {"vocab": 1, "max_positions": 0, "expert_capacity": 0.0, "expert_nodes": 0}
    return known.model_copy(update=free).key == found.model_copy(update=free).key


def _plan(launch: Launch, facts: Mapping[str, Any], devices: int | None) -> tuple[Plan, int]:
    data = {name: value for name, value in facts.items() if name in Plan.model_fields and value is not None}
    others = data.get("tp", 1) * data.get("pp", 1) * data.get("cp", 1)
    if "dp" not in data:
        if devices is None:
            raise InputError(launch.file, None, "the file does not state how many devices there are: give --devices")
        if devices % others:
            raise InputError(launch.file, devices, f"tp * pp * cp = {others} must divide the devices")
        data["dp"] = devices // others
    if "experts_tp" in facts:  # how wide an expert is; a plan says 0 where that goes without saying
        placed = {name: data.get(name, 1) for name in ("tp", "pp", "cp", "dp", "ep")}
        plain = Plan.from_data(placed, launch.file).expert_tp
        data["etp"] = 0 if plain == facts["experts_tp"] else facts["experts_tp"]
    plan = Plan.from_data(data, launch.file)
    if devices is not None and plan.world_size != devices:
        raise InputError(launch.file, devices, f"tp * pp * cp * dp are {plan.world_size} devices")
    return plan, plan.world_size


def _workload(launch: Launch, facts: Mapping[str, Any], plan: Plan) -> Workload:
    data = {name: value for name, value in facts.items() if name in Workload.model_fields and value is not None}
    if "global_batch" not in data and "micro_batches" in facts:
        data["global_batch"] = plan.dp * plan.micro_batch * facts["micro_batches"]
    missing = [option for name, option in OPTION.items() if name not in data]
    if missing:
        raise InputError(launch.file, None, f"the file does not state it: give {', '.join(missing)}")
    batch, each = data["global_batch"], plan.dp * plan.micro_batch
    if isinstance(batch, int) and batch % each:
        allowed = f"a multiple of dp * micro_batch = {plan.dp} * {plan.micro_batch} = {each}"
        raise InputError(f"{launch.file}: global batch", batch, allowed)
    return Workload.from_data(data, launch.file)
