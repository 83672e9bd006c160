"""LocalProber: the devices of one machine as a Prober. Loads no torch."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from autotune.errors import ProberError
from autotune.ports.store import OnProgress
from autotune.specs import (
    ClusterSpec,
    FailureKind,
    Fingerprint,
    JobMember,
    MemberReport,
    MemberState,
    ProbeOutcome,
    ProbeRequest,
)
from autotune.specs.command import CommandBook
from probes.launch.gang import NodeRanks, WorldShare
from probes.launch.merging import merged_outcome
from probes.launch.orders import go_on
from probes.launch.placement import Placement
from probes.program.reading import ReadLog


class LocalProber:
    """Runs probes on warm ranks of this machine, one at a time; implements autotune.ports.store.Prober.

    Args:
        cluster: whose devices the ranks are.
        log_dir: each probe writes into a directory of its own below this one.
        ranks: how many ranks, if not one for each device of the cluster.
        placements: one a rank, for ranks that are not plainly on this machine.
        commands: the user's own programs that may run.
        read_log: reads the logs of frameworks.

    Raises:
        ProberError: the ranks would not be on one machine, and there are no placements.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        log_dir: Path,
        ranks: int | None = None,
        placements: Sequence[Placement] | None = None,
        commands: CommandBook = CommandBook(),
        read_log: ReadLog | None = None,
    ) -> None:
        count = cluster.devices if ranks is None else ranks
        if placements is None and count > cluster.gpus_per_node:
            has = f"{count} ranks on a cluster of {cluster.gpus_per_node} devices a node"
            raise ProberError(f"{has} cannot be started on this machine alone")
        self._cluster = cluster.model_copy(update={"nodes": 1, "gpus_per_node": count})
        self._log_dir = log_dir
        self._ranks = NodeRanks(log_root=log_dir, placements=placements, commands=commands, read_log=read_log)
        self._fingerprint: Fingerprint | None = None

    def fingerprint(self) -> Fingerprint:
        """The environment of rank 0, read once. Raises ProberError if ranks cannot be started."""
        if self._fingerprint is None:
            self._fingerprint = self._ranks.fingerprint(self._share().cluster)
        return self._fingerprint

    def run(self, request: ProbeRequest, *, deadline_s: float, on_progress: OnProgress | None = None) -> ProbeOutcome:
        """Runs one probe; see autotune.ports.store.Prober.run. Ranks that are not warm are started first.

        Raises:
            ProberError: there is nothing to measure with.
        """
        report = self._ranks.run(
            self._share(),
            request,
            deadline_s=deadline_s,
            publish=lambda _: None,
            order=go_on,
            on_progress=on_progress,
        )
        if report.failure is FailureKind.UNAVAILABLE:
            raise ProberError(report.message)
        outcome = merged_outcome(request, self._cluster, [_member(report)], named=False)
        if outcome.failure is None or report.setup_s < report.wall_s:
            return outcome
        # Its ranks were never ready: what went wrong is not the request's fault.
        unavailable = outcome.failure.model_copy(update={"kind": FailureKind.UNAVAILABLE})
        return outcome.model_copy(update={"failure": unavailable})

    @property
    def pids(self) -> list[int]:
        """The processes of the warm ranks, by rank; empty while there are none."""
        return self._ranks.pids

    def close(self) -> None:
        """Ends all ranks. May be called twice."""
        self._ranks.close()

    def __enter__(self) -> LocalProber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _share(self) -> WorldShare:
        """The whole world, kept or started again. Whoever measures here wants to read what its ranks wrote."""
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProberError(f"no logs can be written below {self._log_dir}: {error}") from error
        return WorldShare(world_id=self._ranks.world_id or uuid.uuid4().hex, index=0, cluster=self._cluster)


def _member(report: MemberReport) -> JobMember:
    now = datetime.now(UTC)
    return JobMember(node="here", index=0, address="", state=MemberState.REPORTED, expires_at=now, report=report)
