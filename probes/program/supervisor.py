"""Runs a program of which nothing stays behind: `supervisor.py STATUS_FD GRACE_S COMMAND ...`.

Standard library only, and run by path with `python -I -S`. It is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER):
whatever the program starts, in however many sessions, is a descendant of this process until it ends, daemons that fork
away too. When the program ends, when this process's standard input is closed (its parent closed it or is gone, however
that happened) or says to stop, the program's group gets SIGTERM; after GRACE_S, or once the program itself is gone,
every descendant gets SIGKILL until there is none. How the program ended is then written to STATUS_FD as JSON:
`status` as subprocess has it (None: it could not be started, for `error`), and how many were `left` to be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05
_LEFT_S = 1.0
"""What the program left gets so long to end by itself after SIGTERM."""
_KILL_S = 30.0


def main(arguments: list[str]) -> None:
    """Runs the command to its end."""
    status_fd, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    os.set_inheritable(status_fd, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    child, error = _start(command, libc)
    ended = _Ended(child)
    if child:
        _wait(ended, child, grace_s)
    left = _clear(ended, child)
    told = json.dumps({"status": ended.status, "error": error, "left": left})
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(status_fd, told.encode())


class _Ended:
    """Reaps whatever ends, and keeps how the program did."""

    def __init__(self, child: int) -> None:
        self._child = child
        self.status: int | None = None
        self.is_over = not child

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.is_over = True
                return
            if not pid:
                return
            if pid == self._child:
                self.status, self.is_over = os.waitstatus_to_exitcode(status), True


def _start(command: list[str], libc: ctypes.CDLL) -> tuple[int, str]:
    """The program's process id, leader of its own session without a terminal; 0 and why if it cannot be started."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            os.setsid()
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(writing, f"{error.strerror}: {error.filename or command[0]}".encode())
        os._exit(127)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:  # empty: closed by execve
        why = pipe.read().decode(errors="replace")
    if why:
        os.waitpid(child, 0)
        return 0, why
    return child, ""


def _wait(ended: _Ended, child: int, grace_s: float) -> None:
    """Until the program has ended, or was told to stop and did not within the grace."""
    kill_at = None
    while True:
        ended.reap()
        if ended.is_over or (kill_at is not None and time.monotonic() > kill_at):
            return
        if kill_at is not None:
            time.sleep(_POLL_S)
        elif select.select([0], [], [], _POLL_S)[0]:  # a word or the end of standard input: stop
            kill_at = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)


def _clear(ended: _Ended, child: int) -> int:
    """Ends every descendant; how many there were beside the program. What ended well gets a moment for the rest."""
    ended.reap()
    left = {pid for pid in _descendants() if pid != child}
    if ended.status is not None and left:
        for pid in left:
            _signal(pid, signal.SIGTERM)
        until = time.monotonic() + _LEFT_S
        while _descendants() and time.monotonic() < until:
            time.sleep(_POLL_S)
            ended.reap()
    until = time.monotonic() + _KILL_S
    while (found := _descendants()) and time.monotonic() < until:
        for pid in found:
            _signal(pid, signal.SIGKILL)
        left |= {pid for pid in found if pid != child}
        time.sleep(_POLL_S / 5)
        ended.reap()
    return len(left)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants() -> list[int]:
    """The living processes below this one, nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, []))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
