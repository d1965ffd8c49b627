"""One command in one bubblewrap sandbox, from its start behind a gate to the death of its last process.

The story of a command: bubblewrap makes the namespaces and waits (`--block-fd`); from outside the limits are set and
the door is made; then the gate opens. The gate is double, because bubblewrap goes on when the blocking pipe ends and
binds its life to ours only after it: the shell that becomes the command first reads a line from its input, so a
command whose node died meanwhile ends instead of running alone.

Killing: the sandbox's first process is held by a pidfd from before the gate opens; with it dies its whole process
namespace, whatever sessions and groups were made in it (2 to 6 ms).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polar.runtime.errors import BoxStartFailed
from polar.runtime.local.cgroups import LimitGroups
from polar.runtime.local.door import Relay, listener_inside
from polar.runtime.local.procs import MARK
from polar.runtime.local.waiting import Held, read_until, write_all

GATE = 'IFS= read -r _ || exit 125; exec "$@"'
GO = b"\n"
CHILD_POLL = 0.002  # seconds; the mounts of a box take about 10 ms


@dataclass(frozen=True)
class DoorPlan:
    """Where the door is in the box, and where it leads."""

    port: int
    target: tuple[str, int]
    limit: int
    patience: float


@dataclass(frozen=True, kw_only=True)
class SandboxPlan:
    """How one command is boxed in. `options(status_fd, block_fd)` gives bubblewrap's options, and may block."""

    bwrap: str
    box_id: str
    options: Callable[[int, int], list[str]]
    door: DoorPlan | None
    groups: LimitGroups | None
    rlimits: Sequence[tuple[int, int]]
    patience: float


class SandboxProcess:
    """A started sandbox. `prepare`, then `release`; `end` in any case, after which nothing of it exists."""

    def __init__(
        self, process: asyncio.subprocess.Process, plan: SandboxPlan, status: int, block: int, stdin: int
    ) -> None:
        self.process = process
        self._plan = plan
        self._status = status
        self._block = block
        self._stdin = stdin
        self._outer = Held(process.pid)
        self._first: Held | None = None  # the sandbox's first process
        self._pid = -1
        self._relay: Relay | None = None
        self._open = [status, block, stdin]

    @classmethod
    async def start(cls, plan: SandboxPlan, command: Sequence[str]) -> SandboxProcess:
        """Start bubblewrap, which waits. Raises BoxStartFailed."""
        status, status_theirs = os.pipe2(os.O_CLOEXEC)
        block_theirs, block = os.pipe2(os.O_CLOEXEC)
        stdin_theirs, stdin = os.pipe2(os.O_CLOEXEC)
        options = os.memfd_create("bwrap-arguments")

        def write_options() -> None:
            os.write(options, b"".join(os.fsencode(item) + b"\0" for item in plan.options(status_theirs, block_theirs)))
            os.lseek(options, 0, os.SEEK_SET)

        try:
            await asyncio.to_thread(write_options)
            process = await asyncio.create_subprocess_exec(
                plan.bwrap,
                *("--args", str(options), "--", "/bin/sh", "-c", GATE, "sh", *command),
                pass_fds=(options, status_theirs, block_theirs),
                env={MARK: plan.box_id},
                stdin=stdin_theirs,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            for handle in (status, block, stdin):
                os.close(handle)
            raise BoxStartFailed(f"bubblewrap did not start: {error}") from error
        finally:
            for handle in (status_theirs, block_theirs, stdin_theirs, options):
                os.close(handle)
        for handle in (status, block, stdin):
            os.set_blocking(handle, False)
        return cls(process, plan, status, block, stdin)

    async def prepare(self) -> None:
        """Wait for the namespaces, set limits, make the door. Raises BoxStartFailed."""
        plan = self._plan
        try:
            async with asyncio.timeout(plan.patience):
                line = await read_until(self._status, b"\n")
        except TimeoutError:
            raise BoxStartFailed(f"bubblewrap was not ready within {plan.patience:g} s") from None
        try:
            pid = int(json.loads(line)["child-pid"])
            self._first, self._pid = Held(pid), pid
        except (ValueError, KeyError) as error:
            raise BoxStartFailed("bubblewrap ended before the sandbox stood") from error
        try:
            for kind, value in plan.rlimits:
                resource.prlimit(pid, kind, (value, value))
            if plan.groups is not None:
                await asyncio.to_thread(plan.groups.enter, pid)
        except OSError as error:
            raise BoxStartFailed(f"limits could not be set: {error}") from error
        if plan.door is not None:
            door = plan.door
            listener = await listener_inside(pid, door.port, plan.patience)
            self._relay = Relay(listener, door.target, door.limit, door.patience)

    async def release(self) -> None:
        """Let the command begin, once its life is bound to ours.

        Bubblewrap binds its first process to itself some milliseconds after the block ends, when everything is mounted
        and the shell at the second gate is started. Were that gate open by then, a node that dies in between would
        leave its agent behind, alive and alone.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._block, b"!")
            with contextlib.suppress(TimeoutError):  # then as it is: `wait` sees what becomes of it
                async with asyncio.timeout(self._plan.patience):
                    while not await asyncio.to_thread(_has_child, self._pid):  # noqa: ASYNC110 - it tells nobody
                        await asyncio.sleep(CHILD_POLL)
            os.write(self._stdin, GO)

    async def feed(self, data: bytes) -> None:
        """Write the command's input and end it."""
        await write_all(self._stdin, data)
        self._open.remove(self._stdin)
        os.close(self._stdin)

    async def wait(self) -> None:
        """Return when bubblewrap has ended, which is after the sandbox's last process unless somebody shot it."""
        await self._outer.dead()

    @property
    def door_lost(self) -> int:
        """Connections that found no proxy, or lost it before its answer."""
        return self._relay.lost if self._relay is not None else 0

    async def end(self) -> int | None:
        """Kill what still runs, wait for its death, close everything; the command's exit code, None if none came."""
        try:
            # the first process as well: bubblewrap ties it to itself only just before the command begins
            held = [self._outer] if self._first is None else [self._first, self._outer]
            for process in held:
                process.kill()
            for process in held:
                await process.dead()
                process.close()
            rest = await read_until(self._status, b"")
            return _exit_code(rest)
        finally:
            if self._relay is not None:
                await self._relay.close()
            for handle in self._open:
                os.close(handle)
            self._open.clear()


def _has_child(pid: int) -> bool:
    """Whether a process has a child, or is gone, or the kernel does not tell. Blocks."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return bool(file.read().strip())
    except OSError:
        return True


def _exit_code(status: bytes) -> int | None:
    """The code in bubblewrap's last status line, which it writes only where the command had started."""
    for line in status.splitlines():
        with contextlib.suppress(ValueError):
            code = json.loads(line).get("exit-code")
            if isinstance(code, int):
                return code
    return None
