"""Settings to concrete parts: the one place where the packages meet. Heavy imports happen inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.errors import InputError, StoreError
from autotune.settings import MAX_LIVE, FleetTimes, Settings, database_file, read_settings

ELSEWHERE = "`autotune plan` ranks plans without any hardware"

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.fleet.finishing import Ending
    from autotune.fleet.local import LocalFleet, OnProgress
    from autotune.fleet.node import Heartbeat, NodeHandlers
    from autotune.fleet.service import FleetService
    from autotune.ports.fleet import Queue
    from autotune.ports.store import Prober
    from autotune.queue.sending import CeleryQueue
    from autotune.regression.fleet import FleetRegression
    from autotune.specs import ClusterSpec, Job, Node, ProbeRequest
    from autotune.specs.command import Command, CommandBook, CommandOffer
    from probes.inventory import NodeInventory
    from probes.launch import WorldShare
    from probes.program.reading import LogLines
    from storage import SqlStore


def open_store(url: str | None = None, *, read_only: bool = False) -> SqlStore:
    """The store at `url`, by default the settings'."""
    from storage import open_store as open_sql_store

    if not read_only:
        make_folder(url)
    return open_sql_store(url or read_settings().database_url, read_only=read_only)


def make_folder(url: str | None) -> None:
    """Makes the folder of the settings' SQLite file; one that `url` names must be there. Raises StoreError."""
    file = database_file(read_settings().database_url)
    if url or file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{file} cannot be opened: its directory cannot be made ({reason})") from None


def require_local(cluster: ClusterSpec) -> None:
    """Refuses a cluster that this machine is not: several nodes, or more GPUs than it has.

    Raises:
        InputError: says what this machine has, and that plans can be ranked without hardware.
    """
    from autotune.specs import DeviceKind
    from probes.discover import gpus

    if cluster.nodes > 1:
        raise InputError(
            "--cluster",
            cluster.name,
            f"this command measures on one machine, not on {cluster.nodes} nodes; {ELSEWHERE}",
        )
    if cluster.device.kind is not DeviceKind.CPU:
        found = len(gpus())
        if found < cluster.devices:
            raise InputError(
                "--cluster", cluster.name, f"it has {cluster.devices} GPUs and this machine has {found}; {ELSEWHERE}"
            )


def open_prober(cluster: ClusterSpec, file: Path | None = None) -> Prober:
    """The prober of this machine for a cluster that describes it. Raises InputError for another cluster.

    `file` is of a program of the user's own, which may be run besides those of the settings.
    """
    from probes.launch import LocalProber

    require_local(cluster)
    settings = read_settings()
    book = open_book(settings, file)
    return LocalProber(cluster, log_dir=settings.log_dir, commands=book, read_log=read_log_lines)


def open_book(settings: Settings, file: Path | None = None) -> CommandBook:
    """The user's own programs that may run on this machine: the operator's, and the one of a file."""
    from autotune.specs.command import CommandBook

    return CommandBook(settings.commands_dir, [file] if file is not None else [])


def read_offers(settings: Settings) -> list[CommandOffer]:
    """The programs that this node's operator allows; a file that cannot be used is logged and left out."""
    import logging

    book, log = open_book(settings), logging.getLogger("autotune.node")
    for error in book.broken():
        log.error("a command is left out: %s", error)
    offers = []
    for command in book.all():
        try:
            offers.append(offer_of(command))
        except InputError as error:
            log.error("command %s is left out: %s", command.name, error)
    return offers


def offer_of(command: Command) -> CommandOffer:
    """What others have to know of a program. Raises InputError for a model that cannot be read."""
    from autotune.catalog import load_model

    path = command.template.model
    return command.offer(load_model(str(command.directory / path)) if path else None)


def read_log_lines(framework: str, lines: bytes) -> LogLines:
    """What some lines of a framework's log tell. Raises InputError for what its reader does not understand."""
    from io import BytesIO

    from autotune.imports import deepspeed, megatron, nanotron, torchtitan
    from autotune.imports.logs import LogFile
    from probes.program.reading import LogLines, LogStep

    readers = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed, "nanotron": nanotron}
    log = readers[framework].read(LogFile("the program's log", lambda: BytesIO(lines)))
    memory_bytes = log.reserved_bytes or log.allocated_bytes
    steps = tuple(
        LogStep(
            number=step.number,
            time_s=step.time_s,
            tokens_per_s_per_gpu=step.tokens_per_s_per_gpu,
            samples_per_s=step.samples_per_s,
            memory_bytes=memory_bytes,
        )
        for step in log.steps
    )
    batch = log.facts.get("global_batch")
    return LogLines(steps=steps, global_batch=batch.value if batch and isinstance(batch.value, int) else None)


def require_runnable(cluster: ClusterSpec, request: ProbeRequest) -> None:
    """Refuses a probe that every rank of the cluster would refuse, before any is started. Raises InputError."""
    from autotune.specs import CollectiveRequest, LayerRequest
    from probes.reports import members
    from probes.runnable import check_layer, check_step

    match request:
        case CollectiveRequest():
            members(request, cluster.devices)
        case LayerRequest():
            check_layer(request, cluster.devices)
        case _ if not request.workload.command:
            check_step(request, cluster.devices)


def open_local(
    store: SqlStore,
    cluster: ClusterSpec,
    on_progress: OnProgress = lambda request, progress: None,
    file: Path | None = None,
) -> LocalFleet:
    """This machine as a fleet of one, for a cluster that describes it: else it raises InputError when it is to measure.

    `file` is of a program of the user's own. Close it; the store stays open.
    """
    from autotune.fleet.local import LocalFleet
    from probes.launch import NodeRanks

    def open_ranks() -> NodeRanks:
        require_local(cluster)
        settings = read_settings()
        return NodeRanks(log_root=settings.log_dir, commands=open_book(settings, file), read_log=read_log_lines)

    return LocalFleet(store, cluster, open_ranks, merge=merge_reports, share_of=share_of, on_progress=on_progress)


def open_queue(settings: Settings) -> CeleryQueue:
    """What carries ids to the workers of a fleet. Connects when it first sends. Raises InputError for a bad URL."""
    from autotune.queue.app import create_app
    from autotune.queue.sending import CeleryQueue

    return CeleryQueue(create_app(settings))


def open_fleet(
    store: SqlStore, queue: Queue, times: FleetTimes = FleetTimes(), max_live: int = MAX_LIVE
) -> FleetService:
    """The service of a fleet over a store and what carries ids to its workers. Closing it closes the queue alone."""
    from autotune.fleet.service import FleetService

    return FleetService(store, queue, merge_reports, times, max_live)


def open_regression(settings: Settings, store: SqlStore, queue: Queue, fleet: FleetService) -> FleetRegression:
    """What a fleet's tuners do for its checks. Raises InputError where alerts are set up half or wrongly."""
    from autotune.regression.alerts import Outbox, senders_of
    from autotune.regression.fleet import FleetRegression

    return FleetRegression(store, queue, merge_reports, fleet, Outbox(store, senders_of(settings)))


def merge_reports(job: Job) -> Ending:
    """What the reports of a job's members amount to."""
    from autotune.fleet.finishing import Ending
    from autotune.specs.fleet import LOCAL
    from probes.launch.merging import blamed_node, computing_s, merged_outcome, told_apart

    own = job.pool.startswith(LOCAL)  # there it goes without saying
    outcome = merged_outcome(job.request, job.cluster, job.members, named=not own)
    blamed = blamed_node(told_apart(job.request, job.members))
    return Ending(outcome=outcome, blamed=blamed, calc_s=computing_s(job.request, job.members))


def open_node(settings: Settings, node: Node, interface: str, heartbeat: Heartbeat) -> NodeHandlers:
    """What a worker does as that node; none of its ranks is started yet. Close it."""
    from autotune.fleet.node import NodeHandlers
    from probes.launch import NodeRanks

    store = open_store(settings.database_url)
    return NodeHandlers(
        name=node.name,
        session=node.session,
        store=store,
        fleet=open_fleet(store, open_queue(settings)),
        ranks=NodeRanks(
            log_root=settings.log_dir,
            address=node.address,
            interface=interface,
            commands=open_book(settings),
            read_log=read_log_lines,
        ),
        share_of=share_of,
        heartbeat=heartbeat,
        times=settings.times,
    )


def share_of(job: Job, node: str) -> WorldShare:
    """The part of a job's world that a node contributes."""
    from probes.launch import WorldShare

    index = next(member.index for member in job.members if member.node == node)
    return WorldShare(world_id=job.world_id, index=index, cluster=job.cluster, warm=job.warm)


def read_inventory(settings: Settings, cluster: ClusterSpec, slots: int | None) -> NodeInventory:
    """What this machine has for a cluster that it is a node of; its device is the cluster's where it is that GPU.

    Raises:
        InputError: CPU ranks that do not fit into this machine's memory.
        ProberError: no rank can be started.
    """
    from dataclasses import replace

    from autotune.catalog import recognise
    from probes.inventory import node_inventory

    found = node_inventory(cluster, log_root=settings.log_dir, slots=slots)
    known = recognise(found.device.name, found.device.memory_bytes)
    names = {found.device.name} if known is None else {found.device.name, known.device().name}
    return replace(found, device=cluster.device) if cluster.device.name in names else found
