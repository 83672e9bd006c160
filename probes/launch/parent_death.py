"""Starts a command that dies with its parent: `parent_death.py PARENT_PID STACK_BYTES COMMAND ...`.

Standard library only, and run by path with `python -I -S`, so that it costs a few hundredths of a second. The kernel's
parent-death signal (prctl(2), PR_SET_PDEATHSIG) survives execve, so whatever is started here is killed when
the thread that started it ends, however that happens.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent ends; exits at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def _limit_stacks(stack_bytes: int) -> None:
    """Sets the soft stack limit, which glibc reads once, at start, as the size of every later thread's stack.

    Stacks count towards RLIMIT_DATA in full, and each gloo group starts threads: at the usual 8 MiB a stack, the
    groups of one mesh would take 100 MB of a CPU device's memory.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard == resource.RLIM_INFINITY or stack_bytes <= hard:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))


def main(arguments: list[str]) -> None:
    """Replaces this process with the command. A STACK_BYTES of 0 leaves the stack limit alone."""
    parent_pid, stack_bytes, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    die_with_parent(parent_pid)
    if stack_bytes:
        _limit_stacks(stack_bytes)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
