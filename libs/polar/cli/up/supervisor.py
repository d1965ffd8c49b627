"""Keeps programs running: starts them in order, starts again what ends, stops them in order.

Promises:
- A program that ends after it was once ready is started again, first at once and then after pauses that double up to
  `BACKOFF_MAX_S`; one that has run for `STEADY_S` begins anew with short pauses.
- A program that ends before it was ever ready is a failure of the start, with what it said last.
- Every child dies with this process, also by SIGKILL (see `tether`), and none is left after `stop`.

It knows nothing of what the programs are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CannotUp
from .logs import ChildLog, Line

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0
PROBE_S = 0.1
TETHER = Path(__file__).with_name("tether.py")


@dataclass(frozen=True)
class Program:
    """What to run and how to know that it works.

    `after`: programs that have to be ready before this one is started. `stop`: programs of one number are stopped
    together, once those of lower numbers have ended.
    `ready`: asked until it says yes, again after each start. `before`: called before each start, e.g. to remove the
    file that `ready` looks for. `stop_s`: seconds between SIGTERM and SIGKILL. `hint`: what to do where it
    cannot start.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stop: int
    ready: Callable[[], Awaitable[bool]]
    after: Sequence[str] = ()
    ready_s: float = 60.0
    stop_s: float = 10.0
    before: Callable[[], None] = field(default=lambda: None)
    hint: str | None = None


class Watcher:
    """What a supervisor tells; every method does nothing here."""

    def ready(self, name: str, after_s: float) -> None:
        """A program works, `after_s` seconds after its start."""

    def ended(self, name: str, how: str, why: str, pause_s: float) -> None:
        """A program has ended by itself and is started again after a pause."""

    def said(self, name: str, line: Line) -> None:
        """A program has logged a warning or an error."""


class Supervisor:
    """Runs `programs` from `start` to `stop`; `logs` is the folder of their output."""

    def __init__(self, programs: Sequence[Program], logs: Path, watcher: Watcher) -> None:
        self._children = [_Child(one, logs, watcher) for one in programs]
        self._tasks: dict[asyncio.Task[None], _Child] = {}
        self._watcher = watcher

    async def start(self) -> None:
        """Return when every program is ready.

        Raises:
            CannotUp: one has ended before it was ready, or is not ready in time. The others still run: `stop` them.
        """
        by_name = {child.program.name: child for child in self._children}
        for child in self._children:
            before = [by_name[name] for name in child.program.after if name in by_name]
            self._tasks[asyncio.create_task(child.keep(before), name=child.program.name)] = child
        await self._unless_failed([asyncio.create_task(child.wait_ready()) for child in self._children])

    async def failed(self) -> None:
        """Wait for what should not happen: the keeping of a child itself fails. Raises what it raised."""
        await self._unless_failed([asyncio.create_task(asyncio.Event().wait())])

    async def stop(self) -> list[str]:
        """SIGTERM in the order of `stop`; returns the names of those that had to be killed."""
        killed: list[str] = []
        for stage in sorted({child.program.stop for child in self._children}):
            mine = [child for child in self._children if child.program.stop == stage]
            ends = await asyncio.gather(*(child.end() for child in mine))
            killed += [child.program.name for child, forced in zip(mine, ends, strict=True) if forced]
        await self._close()
        return killed

    async def kill(self) -> None:
        """SIGKILL everything at once."""
        for child in self._children:
            child.signal(signal.SIGKILL)
        await self._close()

    def pids(self) -> dict[str, int]:
        """The running children's process ids."""
        return {child.program.name: child.pid for child in self._children if child.pid is not None}

    def restarts(self) -> dict[str, int]:
        return {child.program.name: child.restarts for child in self._children}

    async def _unless_failed(self, waiting: Sequence[asyncio.Task[Any]]) -> None:
        pending: set[asyncio.Task[Any]] = set(waiting)
        try:
            while pending:
                done, _ = await asyncio.wait([*pending, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                pending -= done
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _close(self) -> None:
        for task, child in self._tasks.items():
            child.stopping = True
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


class _Child:
    """One program over all its lives."""

    def __init__(self, program: Program, logs: Path, watcher: Watcher) -> None:
        self.program = program
        self.stopping = False
        self.restarts = 0
        self._log = ChildLog(logs / f"{program.name}.log", lambda line: watcher.said(program.name, line))
        self._watcher = watcher
        self._process: asyncio.subprocess.Process | None = None
        self._was_ready = asyncio.Event()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._process.send_signal(number)

    async def wait_ready(self) -> None:
        await self._was_ready.wait()

    async def keep(self, before: Sequence[_Child]) -> None:
        """Run the program until `end`, once those `before` it are ready; raises CannotUp where it never got ready."""
        quick = 0
        for other in before:
            await other.wait_ready()
        try:
            while True:
                began = time.monotonic()
                code = await self._live()
                if self.stopping:
                    return
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                if not self._was_ready.is_set():
                    why = self._log.why()
                    raise CannotUp(
                        f"{self.program.name} could not start ({how})" + (f": {why}" if why else ""),
                        hint=self._where(),
                    )
                quick = 0 if time.monotonic() - began >= STEADY_S else quick + 1
                pause = BACKOFF_S[quick - 1] if 0 < quick <= len(BACKOFF_S) else BACKOFF_MAX_S if quick else 0.0
                self.restarts += 1
                self._watcher.ended(self.program.name, how, self._log.why(errors_only=code < 0), pause)
                await asyncio.sleep(pause)
        finally:
            if self.pid is not None:
                self.signal(signal.SIGKILL)
                assert self._process is not None
                await self._process.wait()
            self._log.close()

    async def end(self) -> bool:
        """SIGTERM, and SIGKILL where that does not do it in time; whether that was needed."""
        self.stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return False
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.program.stop_s):
                await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()
            return True
        return False

    async def _live(self) -> int:
        """One life; returns the exit code, negative for a signal."""
        self._log.begin()
        self.program.before()
        began = time.monotonic()
        tether = (sys.executable, "-I", "-S", str(TETHER), str(os.getpid()))
        self._process = process = await asyncio.create_subprocess_exec(
            *tether,
            *self.program.argv,
            env=dict(self.program.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at a terminal is for the supervisor alone, which stops them in order
        )
        assert process.stdout is not None
        pump = asyncio.create_task(self._log.pump(process.stdout))
        probe = asyncio.create_task(self._probe(began))
        waiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait([waiting, probe], return_when=asyncio.FIRST_COMPLETED)
            if probe.done():
                probe.result()  # too late to be ready
            code = await waiting
            # a grandchild may hold the pipe open for longer than the child lives
            await asyncio.wait([pump], timeout=2.0)
            return code
        finally:
            for task in (pump, probe, waiting):
                task.cancel()
            await asyncio.gather(pump, probe, waiting, return_exceptions=True)

    async def _probe(self, began: float) -> None:
        while not await self.program.ready():
            if time.monotonic() - began > self.program.ready_s and not self._was_ready.is_set():
                why = self._log.why(errors_only=True)
                raise CannotUp(
                    f"{self.program.name} is not ready after {self.program.ready_s:g} s" + (f": {why}" if why else ""),
                    hint=self._where(),
                )
            await asyncio.sleep(PROBE_S)
        self._was_ready.set()
        self._watcher.ready(self.program.name, time.monotonic() - began)

    def _where(self) -> str:
        log = f"its log: {self._log.path}"
        return f"{self.program.hint}; {log}" if self.program.hint else log
