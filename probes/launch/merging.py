"""What the reports of all ranks amount to: readings, or the first cause of a failure, and whose it is. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    Failure,
    FailureKind,
    JobMember,
    LayerReading,
    LayerRequest,
    MemberReport,
    MemberState,
    ProbeOutcome,
    ProbeRequest,
    RankReport,
    StepReading,
    StepRequest,
)
from probes.launch.failures import RankFailure, precedence
from probes.reports import layer_calc_s, merge_collective, merge_layer, merge_step

MODULES = {"collective": "probes.collective", "layer": "probes.layer", "step": "probes.step"}
"""The module that runs each kind of request on a rank."""

Readings = tuple[CollectiveReading, ...] | tuple[LayerReading, ...] | tuple[StepReading, ...]

# What malformed reports make the merge functions raise; pydantic's ValidationError is a ValueError.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# These tell of a connection or of silence, which all its ends see alike.
_SEEN_BY_ALL = frozenset({FailureKind.COMMUNICATION, FailureKind.HANG})
_AT_NODES = frozenset({FailureKind.CRASH, FailureKind.LOST, FailureKind.UNAVAILABLE, *_SEEN_BY_ALL})


def merged_readings(
    request: ProbeRequest, reports: Mapping[int, dict[str, Any]], cluster: ClusterSpec
) -> tuple[Readings, RankFailure | None]:
    """The readings, or a failure if what the ranks reported is no reading (a time that is not a number, say)."""
    try:
        with np.errstate(all="ignore"):  # no warning: what becomes of it is refused
            return _merged(request, reports, cluster), None
    except _MALFORMED as error:
        text = str(error).splitlines()[-1] if isinstance(error, ValueError) and str(error) else repr(error)
        message = f"the ranks' reports are no reading: {text}"
        return (), RankFailure(rank=None, kind=FailureKind.CRASH, message=message)


def _merged(request: ProbeRequest, reports: Mapping[int, dict[str, Any]], cluster: ClusterSpec) -> Readings:
    if isinstance(request, CollectiveRequest):
        return merge_collective(request, reports)
    if isinstance(request, LayerRequest):
        return merge_layer(request, reports)
    if request.workload.command:
        steps = next((report for _, report in sorted(reports.items()) if report["step_times_s"]), None)
        if steps is None:
            raise ValueError("no node told a step of the program")
        told = ("step_times_s", "warmup_times_s", "losses", "pruned")
        reports = {rank: {**report, **{name: steps[name] for name in told}} for rank, report in reports.items()}
    return merge_step(request, reports, cluster.device.peak_flops_per_s.get(request.workload.dtype))


def stage_of(request: ProbeRequest, rank: int | None, world_size: int) -> int | None:
    """The pipeline stage of a rank: pp is the outermost axis, so it follows from the rank's number."""
    if not isinstance(request, StepRequest) or rank is None or request.plan.world_size != world_size:
        return None
    return rank // (world_size // request.plan.pp)


def merged_outcome(
    request: ProbeRequest, cluster: ClusterSpec, members: Sequence[JobMember], *, named: bool = True
) -> ProbeOutcome:
    """What a job measured, or the first cause of its failure over all ranks of all nodes.

    Never raises for what members report: reports that are missing, doubled, of ranks that are not the member's, or no
    reading are a CRASH.

    Args:
        request: what the ranks were asked.
        cluster: the gang.
        members: in any order, each with its report unless it was lost.
        named: whether the message of a failure names its node.
    """
    members = told_apart(request, members)
    reports = [member.report for member in members if member.report is not None]
    wall_s = max((report.wall_s for report in reports), default=0.0)
    setup_s = max((report.setup_s for report in reports), default=0.0)
    readings: Readings = ()
    failure: Failure | None = None
    if (cause := _cause(members)) is not None:
        failure = _failure(request, cluster, cause, named=named)
    elif (wrong := _wrong_ranks(cluster, members)) is not None:
        failure = Failure(kind=FailureKind.CRASH, message=wrong)
    else:
        readings, unreadable = merged_readings(request, _by_rank(members), cluster)
        if unreadable is not None:
            failure = Failure(kind=unreadable.kind, message=unreadable.message)
    build_s = sum(reading.setup_s for reading in readings if isinstance(reading, StepReading))
    return ProbeOutcome(
        readings=readings,
        failure=failure,
        wall_s=wall_s,
        gpu_s=wall_s * cluster.devices,
        setup_s=setup_s + build_s,
        log_path=next((report.log_dir for report in reports if report.log_dir), None),
    )


def told_apart(request: ProbeRequest, members: Sequence[JobMember]) -> Sequence[JobMember]:
    """The members of a job; where a program ran and one of them knows its speed, the others without their failures.

    Whoever measured has ended its part of the program, at which the other parts fail.
    """
    if not (isinstance(request, StepRequest) and request.workload.command):
        return members
    found = next((member for member in members if any(_has_steps(rank) for rank in _ranks(member.report))), None)
    if found is None:
        return members
    told = next(rank.report for rank in _ranks(found.report) if _has_steps(rank))
    size = len(_ranks(found.report))
    return [
        member if member.report is not None and not any(_failures(member)) else _without_failure(member, told, size)
        for member in members
    ]


def _has_steps(rank: RankReport) -> bool:
    return rank.report is not None and bool(rank.report.get("step_times_s"))


def _without_failure(member: JobMember, told: dict[str, Any] | None, size: int) -> JobMember:
    first = member.index * size
    ranks = tuple(RankReport(rank=rank, report={**(told or {}), "rank": rank}) for rank in range(first, first + size))
    changes = {"ranks": ranks, "failure": None, "message": "", "ordered": False}
    report = (member.report or MemberReport()).model_copy(update=changes)
    return member.model_copy(update={"state": MemberState.REPORTED, "report": report})


def computing_s(request: ProbeRequest, members: Sequence[JobMember]) -> dict[int, float]:
    """Seconds that each rank computed in a layer probe or in the traced step, whatever it waited for others.

    Empty where nobody told, or not plainly.

    Args:
        request: what the ranks were asked.
        members: of the gang.
    """
    reports = _by_rank(members)
    try:
        if isinstance(request, LayerRequest):
            found = {rank: layer_calc_s(report) for rank, report in reports.items()}
        elif isinstance(request, StepRequest):
            found = {rank: float(report["trace"]["calc_s"]) for rank, report in reports.items() if report["trace"]}
        else:
            found = {}
    except _MALFORMED:
        return {}
    return found if all(math.isfinite(time_s) for time_s in found.values()) else {}


def blamed_node(members: Sequence[JobMember]) -> str | None:
    """The node that holds the cause of a job's failure; None without a failure, or where it is not known.

    OOM and refusals are nobody's fault. A failed connection and silence are seen from all sides: a node is blamed for
    those only if no other failed, or if one of its ranks was stopped. Where all nodes of a gang were lost none is
    blamed: nobody is left who saw one go first, and what they share (a switch, the database) is likelier.
    """
    cause = _cause(members)
    if cause is None or cause.ordered or cause.kind not in _AT_NODES or not cause.node:
        return None
    if cause.kind in _SEEN_BY_ALL and not cause.stopped:
        failed = {member.node for member in members if any(_failures(member))}
        return cause.node if failed == {cause.node} else None
    return cause.node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """A failure and the node that told it; no node where it was all of them."""

    node: str
    kind: FailureKind
    message: str
    rank: int | None = None
    stopped: bool = False
    ordered: bool = False
    log_path: str | None = None
    log_tail: str = ""


def _cause(members: Sequence[JobMember]) -> _Cause | None:
    """The failure that explains the others.

    Of equal kinds a stopped rank comes before those that waited for it, what a node saw itself before what it was
    told, then the first in the order of nodes.
    """
    if len(members) > 1 and all(member.state is MemberState.LOST for member in members):
        return _Cause(node="", kind=FailureKind.LOST, message="all nodes were lost before they reported")
    failures = [failure for member in sorted(members, key=lambda each: each.index) for failure in _failures(member)]
    return min(failures, key=lambda each: (precedence(each.kind), not each.stopped, each.ordered), default=None)


def _failures(member: JobMember) -> Iterator[_Cause]:
    report = member.report
    if member.state is MemberState.LOST or report is None:
        yield _Cause(node=member.node, kind=FailureKind.LOST, message="the node was lost before it reported")
        return
    yield from (_rank_cause(member.node, rank, rank.failure) for rank in report.ranks if rank.failure is not None)
    own = any(rank.failure is not None for rank in report.ranks)
    if report.failure is not None and (report.ordered or not own):
        yield _Cause(
            node=member.node,
            kind=report.failure,
            message=report.message or f"stopped: {report.failure}",
            ordered=report.ordered,
            log_path=report.log_dir or None,
            log_tail=report.log_tail,
        )


def _rank_cause(node: str, rank: RankReport, kind: FailureKind) -> _Cause:
    return _Cause(
        node=node,
        kind=kind,
        message=rank.message,
        rank=rank.rank,
        stopped=rank.stopped,
        log_path=rank.log_path,
        log_tail=rank.log_tail,
    )


def _failure(request: ProbeRequest, cluster: ClusterSpec, cause: _Cause, *, named: bool) -> Failure:
    # What a node was told to stop for is not about that node.
    message = f"node {cause.node}: {cause.message}" if named and cause.node and not cause.ordered else cause.message
    return Failure(
        kind=cause.kind,
        message=message,
        rank=cause.rank,
        stage=stage_of(request, cause.rank, cluster.devices),
        log_path=cause.log_path,
        log_tail=cause.log_tail,
    )


def _wrong_ranks(cluster: ClusterSpec, members: Sequence[JobMember]) -> str | None:
    """What is wrong with who reported, in words, where nobody reports a failure; None if all is as it should be."""
    indices = sorted(member.index for member in members)
    if indices != list(range(cluster.nodes)):
        return f"a gang of {cluster.nodes} nodes has members {indices}, not one of each from 0 to {cluster.nodes - 1}"
    for member in members:
        first = member.index * cluster.gpus_per_node
        expected = list(range(first, first + cluster.gpus_per_node))
        reported = sorted(rank.rank for rank in _ranks(member.report))
        if reported != expected:
            return f"node {member.node} reported ranks {reported}, not {expected}"
        for rank in _ranks(member.report):
            if rank.report is None or rank.report.get("rank", rank.rank) != rank.rank:
                return f"node {member.node} reported nothing, or another rank's measurements, for rank {rank.rank}"
    return None


def _ranks(report: MemberReport | None) -> tuple[RankReport, ...]:
    return report.ranks if report is not None else ()


def _by_rank(members: Sequence[JobMember]) -> dict[int, dict[str, Any]]:
    ranks = [rank for member in members for rank in _ranks(member.report)]
    return {rank.rank: rank.report for rank in ranks if rank.report is not None}
