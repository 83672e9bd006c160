"""From a command's file and a plan to what is really started: arguments, environment and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InputError
from autotune.specs import StepRequest
from autotune.specs.command import MAX_ROUNDS, Command, Condition, Words, filled, names_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node stands in the program's world.

    Args:
        nnodes: nodes.
        nproc: ranks of a node.
        node_rank: this node's number.
        master_addr: address of the first node.
        master_port: a port that was free there.
        work_dir: an empty directory.
    """

    nnodes: int
    nproc: int
    node_rank: int
    master_addr: str
    master_port: int
    work_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A program without placeholders."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    directory: str
    metrics: str


def words_of(request: StepRequest, place: Place, command: Command) -> dict[str, str]:
    """What each placeholder stands for (specs.command.PLACEHOLDERS)."""
    plan, workload, model = request.plan, request.workload, request.model
    replica_batch = workload.global_batch // plan.dp
    chunks = plan.pp * plan.vpp
    words: dict[str, object] = {
        name: getattr(plan, name)
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "zero_stage", "recompute", "schedule",
                     "sequence_parallel")
    }  # fmt: skip
    words |= {
        name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    }
    words |= {name: getattr(place, name) for name in ("nnodes", "nproc", "node_rank", "master_addr", "master_port",
                                                      "work_dir")}  # fmt: skip
    words |= {
        "etp": plan.expert_tp,
        "recompute_modules": ",".join(plan.recompute_modules),
        "accumulation": replica_batch // plan.micro_batch,
        "replica_batch": replica_batch,
        "global_batch": workload.global_batch,
        "seq_len": workload.seq_len,
        "dtype": workload.dtype,
        "chunk_layers": -(-model.layers // chunks),
        "world_size": plan.world_size,
        "template_dir": command.directory,
        "steps": steps_looked_at(request),
    }
    told = {name: _text(value) for name, value in words.items()}
    for _ in range(MAX_ROUNDS):  # values may name each other
        for name, cases in command.template.values.items():
            case = next((case for case in cases if holds(case.when, told)), None)
            if case is None:
                raise InputError(f"{command.name}: values.{name}", request.plan.key, "no case holds for this plan")
            known = told | {other: told.get(other, "{" + other + "}") for other in command.template.values}
            told[name] = filled(case.value, known, f"{command.name}: values.{name}")
    own = set(command.template.values)
    circle = next((name for name in own if own & set(names_in(told[name]))), None)
    if circle is not None:
        raise InputError(f"{command.name}: values.{circle}", told[circle], "a value that does not name itself")
    return told


def steps_looked_at(request: StepRequest) -> int:
    """Steps that a program has to run at most: half of them may be warm-up."""
    return 2 * request.max_steps + request.warmup_steps


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def holds(condition: Condition, words: dict[str, str]) -> bool:
    """Whether each placeholder of the condition has one of its values."""
    return all(words[name] in {_text(value) for value in values} for name, values in condition.items())


def render(command: Command, request: StepRequest, place: Place) -> Rendered:
    """The program for a plan. Raises InputError for a plan that no case of a value covers."""
    template, words = command.template, words_of(request, place, command)
    argv: list[str] = []
    for word in template.argv:
        if isinstance(word, Words):
            argv += [filled(each, words, "argv") for each in word.argv] if holds(word.when, words) else []
        else:
            argv.append(filled(word, words, "argv"))
    return Rendered(
        argv=tuple(argv),
        environment={name: filled(text, words, name) for name, text in template.environment.items()},
        files={name: filled(text, words, name) for name, text in command.texts.items()},
        directory=filled(template.directory, words, "directory") or str(place.work_dir),
        metrics=filled(template.speed.file, words, "speed.file"),
    )
