"""What an error is called, and which of several is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import IllegalPlanError, ProberError
from autotune.specs import FailureKind
from probes.launch.failures import (
    RankFailure,
    cause_of,
    death_of,
    first_cause,
    kind_of,
    kind_of_text,
    message_of,
    tail_of,
)


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which this side does not import."""


class DistBackendError(RuntimeError):
    """Named as torch's."""


CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "553648128 bytes. Error code 12 (Cannot allocate memory)"
)
GLOO_CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:24117"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FailureKind.OOM),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), FailureKind.OOM),
        (RuntimeError(CPU_OOM), FailureKind.OOM),
        (RuntimeError(GLOO_CLOSED), FailureKind.COMMUNICATION),
        (DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed."), FailureKind.COMMUNICATION),
        (IllegalPlanError("plan.tp", 3, "tp must divide heads"), FailureKind.ILLEGAL),
        (ProberError("ranks need torch"), FailureKind.UNAVAILABLE),
        (ValueError("anything else"), FailureKind.CRASH),
    ],
)
def test_kinds_of_errors(error: Exception, kind: FailureKind) -> None:
    assert kind_of(error) is kind


def test_a_wrapped_error_is_judged_by_its_cause() -> None:
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012 - the wrapping is the case
        try:
            raise RuntimeError(CPU_OOM)
        except RuntimeError as error:
            raise RuntimeError("[Stage 1] failed to run forward:\n args: ()") from error
    assert str(cause_of(caught.value)) == CPU_OOM


def test_an_error_while_another_is_handled_does_not_hide_it() -> None:
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        try:
            raise MemoryError
        finally:
            raise RuntimeError(GLOO_CLOSED)
    assert isinstance(cause_of(caught.value), MemoryError)


def test_of_unknown_errors_the_explicit_cause_counts() -> None:
    with pytest.raises(ValueError, match="what it means") as caught:  # noqa: PT012
        try:
            {}["key"]
        except KeyError:
            raise ValueError("what it means") from ArithmeticError("why")
    assert isinstance(cause_of(caught.value), ArithmeticError)
    assert str(cause_of(ValueError("alone"))) == "alone"


def test_the_log_of_a_dead_rank_tells_an_uncaught_bad_alloc() -> None:
    assert kind_of_text("terminate called after throwing an instance of 'std::bad_alloc'") is FailureKind.OOM
    assert kind_of_text("Fatal Python error: Segmentation fault") is FailureKind.CRASH


@pytest.mark.parametrize(
    ("kinds", "cause"),
    [
        (["hang", "communication", "crash", "oom"], "oom"),
        (["communication", "crash", "hang"], "crash"),
        (["hang", "communication"], "communication"),
        (["communication", "illegal"], "illegal"),
    ],
)
def test_the_cause_of_several_failures(kinds: list[str], cause: str) -> None:
    failures = [RankFailure(rank=rank, kind=FailureKind(kind), message="") for rank, kind in enumerate(kinds)]
    assert first_cause(failures) == failures[kinds.index(cause)]


def test_of_equal_failures_the_first_is_the_cause() -> None:
    failures = [RankFailure(rank=rank, kind=FailureKind.CRASH, message="") for rank in (2, 0, 1)]
    assert first_cause(failures) == failures[0]
    assert first_cause([]) is None


def test_messages() -> None:
    assert message_of(ValueError("one\ntwo\n\n")) == "ValueError: two"
    assert message_of(MemoryError()) == "MemoryError"
    assert message_of(OSError("no file '/data/\udcff'")) == r"OSError: no file '/data/\udcff'"  # a path that is no text
    assert message_of(IllegalPlanError("plan.tp", 3, "tp must divide heads")).startswith("plan.tp: 3 cannot")
    assert death_of(-9) == "was killed by SIGKILL"
    assert death_of(2) == "exited with status 2"


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail_of(log).splitlines() == [f"line {number}" for number in range(99_970, 100_000)]
    assert tail_of(tmp_path / "none") == ""
