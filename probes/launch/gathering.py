"""Waiting for the answers of all ranks: to a report each, or to the first cause of a failure."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.ports.store import OnProgress
from autotune.specs import FailureKind, ProbeProgress
from probes.launch.channel import Channel, Message
from probes.launch.failures import RankFailure, first_cause, kind_of_text, tail_of

Poll = Callable[[], RankFailure | None]

# After a first failure the other ranks have this long to tell theirs, which may be the cause.
_GRACE_S = 1.5
_POLL_S = 0.2
_STACKS_S = 0.3


class RankLink(Protocol):
    """The launcher's side of one rank."""

    @property
    def channel(self) -> Channel:
        """Where it answers."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def log_path(self) -> Path:
        """Where it writes now."""

    def death(self) -> str:
        """How it ended, in words, after its channel has closed; kills it if it has not ended."""


@dataclass(slots=True)
class Gathered:
    """What came of one request. `failure` is None if every rank gave a report.

    `stop` is what the launcher was told to stop for, which is no failure of these ranks.
    """

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    held_bytes: dict[int, int] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    all_answered: bool = True
    stop: RankFailure | None = None

    @property
    def failure(self) -> RankFailure | None:
        """The first cause, if one of these ranks failed."""
        return first_cause(self.failures.values())


class Progress:
    """When a run started, when its last rank was ready, and who wants to hear of its progress."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self.start_s = time.monotonic()
        self.ready_s: float | None = None

    def note(self, _: int, message: Message) -> None:
        """Takes a message that is no answer."""
        if message["type"] == "ready":
            self.ready_s = time.monotonic() - self.start_s
        elif message["type"] == "progress" and self._on_progress is not None:
            self._on_progress(ProbeProgress.from_data(message["progress"]))


def gather(
    links: Mapping[int, RankLink],
    deadline: float,
    on_note: Callable[[int, Message], None] | None = None,
    poll: Poll | None = None,
) -> Gathered:
    """Waits until every rank has answered or ended, `deadline` (time.monotonic) passes, or the grace after a failure.

    Messages that are no answers go to `on_note` as they come. `poll` is called several times a second; what it returns
    is a reason to stop: at once if that is CANCELLED, after the grace otherwise.
    """
    result = Gathered()
    waiting = dict(links)
    with selectors.DefaultSelector() as selector:
        for rank, link in links.items():
            selector.register(link.channel, selectors.EVENT_READ, rank)
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            # Also once the time is up: an answer that came while `poll` waited for somebody is an answer.
            for key, _ in selector.select(left_s if poll is None else min(left_s, _POLL_S)):
                rank, link = key.data, links[key.data]
                if _take(rank, link, result, on_note):
                    waiting.pop(rank, None)
                    selector.unregister(link.channel)
            if not left_s:
                break
            if poll is not None and result.stop is None:
                result.stop = poll()
            if result.failures or result.stop is not None:
                deadline = min(deadline, time.monotonic() + _grace_s(result))
    _mark_silent(waiting, result)
    return result


def _grace_s(result: Gathered) -> float:
    return 0.0 if result.stop is not None and result.stop.kind is FailureKind.CANCELLED else _GRACE_S


def _take(rank: int, link: RankLink, result: Gathered, on_note: Callable[[int, Message], None] | None) -> bool:
    """Reads what a rank sent; True once it has answered or ended."""
    messages = link.channel.receive()
    if messages is None:
        death = link.death()
        kind = kind_of_text(tail_of(link.log_path))
        result.failures[rank] = RankFailure(rank=rank, kind=kind, message=f"rank {rank} {death}")
        result.all_answered = False
        return True
    for message in messages:
        if message["type"] == "report":
            result.reports[rank] = message["report"]
            result.held_bytes[rank] = message["held_bytes"]
            return True
        if message["type"] == "failure":
            kind = FailureKind(message["kind"])
            result.failures[rank] = RankFailure(rank=rank, kind=kind, message=message["message"])
            return True
        if on_note is not None:
            on_note(rank, message)
    return False


def _mark_silent(waiting: Mapping[int, RankLink], result: Gathered) -> None:
    """Records the ranks that did not answer; of several, one that is stopped is the cause and comes first.

    Where others told to stop, for another reason than a hang, only a rank that is stopped has failed.
    """
    if not waiting:
        return
    result.all_answered = False
    told = result.stop.kind if result.stop is not None else FailureKind.HANG
    if told is FailureKind.CANCELLED:
        return
    stopped = [rank for rank, link in waiting.items() if _is_stopped(link.pid)]
    _ask_for_stacks(waiting)
    for rank in sorted(waiting if told is FailureKind.HANG else stopped, key=lambda rank: rank not in stopped):
        state = "is stopped" if rank in stopped else "did not answer"
        others = f"; silent ranks: {sorted(waiting)}" if len(waiting) > 1 else ""
        message = f"rank {rank} {state} at the deadline{others}"
        hang = RankFailure(rank=rank, kind=FailureKind.HANG, message=message, stopped=rank in stopped)
        result.failures[rank] = hang


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _ask_for_stacks(waiting: Mapping[int, RankLink]) -> None:
    """Makes silent ranks write where they are into their logs (faulthandler, in rank.listen)."""
    for link in waiting.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(link.pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
