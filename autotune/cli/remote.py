"""`autotune tune` with a server: its nodes measure; what happens is shown until it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import output
from autotune.cli.asking import connect
from autotune.cli.tunings import print_tuning
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.client import Client
    from autotune.specs import Budget, ClusterSpec, ModelSpec, SamplerName, Space


def model_of(ref: str | None) -> str | ModelSpec:
    """A model for a request: a file is read here, since servers open none; a name is the server's."""
    from autotune.catalog import load_model, smallest

    if ref is None:
        return smallest().name
    return load_model(ref) if Path(ref).exists() else ref


def cluster_of(ref: str | None) -> str | ClusterSpec:
    """A cluster for a request: a file is read here, a name is a pool of the server. Raises InputError without one."""
    from autotune.catalog import load_cluster

    if ref is None:
        raise InputError("--cluster", None, "name one of the server's clusters: autotune --server URL cluster list")
    return load_cluster(ref, lambda _: None) if Path(ref).exists() else ref


def tune(
    *,
    model: str | None,
    cluster: str | None,
    nodes: int | None,
    workload: dict[str, Any],
    space: Space,
    budget: Budget,
    seed: int,
    cold: bool,
    sampler: SamplerName,
    follow: bool,
    as_json: bool,
) -> int:
    """Submits a tuning and, unless told not to, follows it to its end."""
    asked = cluster_of(cluster)
    with connect() as client:
        told = client.submit(
            model_of(model), asked, nodes=nodes, workload=_given(workload), space=space, budget=budget,
            seed=seed, cold=cold, sampler=sampler,
        )  # fmt: skip
        console = output.error_console()
        joined = "" if told["created"] else " (somebody has asked for the same: you share it)"
        console.print(f"Tuning {told['tuning']} is {told['state']}{joined}", soft_wrap=True)
        for line in _cautions(client, asked if isinstance(asked, str) else asked.name, cold=cold):
            console.print(line, soft_wrap=True)
        if follow:
            return follow_tuning(client, told["tuning"], as_json=as_json)
    if as_json:
        output.print_json(told)
    return 0


def _cautions(client: Client, pool: str, *, cold: bool) -> Iterator[str]:
    """What a user should know before a tuning begins."""
    from autotune.fleet.eligibility import LOST_AFTER_S

    if cold:
        yield "Cold: every trial starts its ranks anew, which costs many times the GPU-seconds of warm ranks"
    if not any(node["session"] and node["heartbeat_age_s"] <= LOST_AFTER_S for node in client.nodes(pool)):
        yield f"No node of pool {pool} lives: it waits until one does (autotune nodes list)"


def follow_tuning(client: Client, tuning_id: str, *, as_json: bool) -> int:
    """Prints a tuning's events as they come, then its result. Ctrl-C leaves the tuning running."""
    from autotune.cli.tune_view import event_text

    console = output.error_console()
    try:
        for event in client.events(tuning_id):
            console.print(event_text(event), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"It goes on without you: autotune show {tuning_id}, autotune cancel {tuning_id}", soft_wrap=True)
        raise
    data = client.tuning(tuning_id)
    output.print_json(data) if as_json else print_tuning(data)
    return 0 if data["state"] == "done" else 1


def settle_there(query: dict[str, Any], budget: Budget, *, as_json: bool) -> int:
    """A tuning that stops when little is expected to be gained, on the server's nodes."""
    from autotune.specs import SamplerName, Space

    workload = {name: query[name] for name in ("seq_len", "global_batch", "dtype")}
    return tune(
        model=query["model"], cluster=query["cluster"], nodes=None, workload=workload, space=Space(), budget=budget,
        seed=0, cold=False, sampler=SamplerName.PLAN, follow=True, as_json=as_json,
    )  # fmt: skip


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
