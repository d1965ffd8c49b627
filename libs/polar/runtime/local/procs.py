"""Finding and killing the processes of a box from outside, by the mark in their environment.

The second net below each backend's own killing: it finds what an earlier node process left behind. A process is
known by `POLAR_BOX_ID=<id>` in its first environment, which a process can not change from within a sandbox.
All calls block.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

MARK = "POLAR_BOX_ID"
EXEC_MARK = "POLAR_EXEC_ID"


def marked(value: str, name: str = MARK) -> list[int]:
    """Ids of processes whose environment has `name=value`; other users' (unreadable) and dead ones are left out."""
    wanted = f"{name}={value}".encode()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _has_mark(int(entry), wanted)]


def _has_mark(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False


def kill_until_none(find: Callable[[], Iterable[int]], timeout: float = 10.0) -> list[int]:
    """SIGKILL what `find` names until it names nothing; returns what is left when the time is over.

    Each process is held by a pidfd before it is looked at again, so that a reused id is never hit.
    """
    deadline = time.monotonic() + timeout
    while found := list(find()):
        handles = []
        try:
            for pid in found:
                with contextlib.suppress(OSError):
                    handles.append((pid, os.pidfd_open(pid)))
            still = set(find())
            poll = select.poll()
            for pid, handle in handles:
                if pid in still:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    poll.register(handle, select.POLLIN)
            poll.poll(100)  # milliseconds; a zombie whose parent has not reaped it bears no mark any more
        finally:
            for _, handle in handles:
                os.close(handle)
        if time.monotonic() > deadline:
            return found
    return []
