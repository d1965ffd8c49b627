"""`Up`: the whole installation as a context manager, from an empty folder to ready and back.

Promises: entering returns when every part is ready, or raises `CannotUp` with nothing left running; leaving stops the
parts in order within seconds. Whoever kills this process kills all of it, and the next `Up` on the folder goes on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from rich.markup import escape

from ..output import visible
from .errors import CannotUp
from .folder import Folder
from .logs import Line, Slower
from .plan import Plan, Wish, make_plan
from .supervisor import Supervisor, Watcher

CONNECT_S = 5.0


class Up:
    """One installation. `tell` takes lines of rich markup for whoever watches; `quiet`: only what goes wrong."""

    def __init__(
        self, wish: Wish, tell: Callable[[str], None], *, environ: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.wish = wish
        self.ready_after_s = 0.0
        self._environ = dict(os.environ if environ is None else environ)
        self._tell = tell
        self._quiet = quiet
        self._plan: Plan | None = None
        self._folder: Folder | None = None
        self._supervisor: Supervisor | None = None

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("not entered")
        return self._plan

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("not entered")
        return self._supervisor

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._folder = folder = await asyncio.to_thread(Folder.open, self.wish.directory)
        try:
            self._plan = plan = await asyncio.to_thread(make_plan, self.wish, folder, self._environ)
            if not plan.embedded_kafka:
                await asyncio.to_thread(_reach_kafka, plan.kafka)
            if not plan.embedded_model:
                await self._look_at_engines()
            watcher = _Told(self._tell, quiet=self._quiet)
            self._supervisor = Supervisor(plan.programs, folder.path / "logs", watcher)
            await self._supervisor.start()
            watcher.starting = False
        except BaseException:
            # a start that failed, or that was interrupted: nothing is worth draining
            if self._supervisor is not None:
                await self._supervisor.kill()
            folder.close()
            raise
        self.ready_after_s = time.monotonic() - began
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> list[str]:
        """Stop all parts; returns the names of those that did not end by themselves. Once more does nothing."""
        if self._supervisor is None or self._folder is None:
            return []
        try:
            return await self._supervisor.stop()
        finally:
            self._folder.close()

    async def kill(self) -> None:
        """End all parts at once, as a power cut would."""
        await self.supervisor.kill()

    def memory_bytes(self) -> int | None:
        """What this process and its children use together, shared pages counted once; None where it cannot be told."""
        pids = [os.getpid(), *self.supervisor.pids().values()]
        found = [memory_of(pid) for pid in pids]
        known = [one for one in found if one is not None]
        return sum(known) if known else None

    async def _look_at_engines(self) -> None:
        for url in self.plan.engines:
            why = await asyncio.to_thread(unanswered, url)
            if why is not None:
                self._tell(
                    f"[yellow]no engine answers at {escape(url)}[/] ({escape(why)}): calls fail until one does; "
                    "start vLLM there, or leave --model-url away for the embedded model"
                )


class _Told(Watcher):
    """Puts what the supervisor says on the terminal."""

    def __init__(self, tell: Callable[[str], None], *, quiet: bool) -> None:
        self.starting = True
        self._tell = tell
        self._quiet = quiet
        self._slower: dict[str, Slower] = {}

    def ready(self, name: str, after_s: float) -> None:
        if not self._quiet or not self.starting:
            what = "ready" if self.starting else "ready again"
            self._tell(f"  {name:<10} {what} after {after_s:.1f} s")

    def ended(self, name: str, how: str, why: str, pause_s: float) -> None:
        when = f"in {pause_s:g} s" if pause_s else "now"
        because = f": {escape(visible(why))}" if why else ""
        self._tell(f"[yellow]{name} ended ({how})[/]{because}; starting it again {when}")

    def said(self, name: str, line: Line) -> None:
        if self.starting:
            return  # parts that wait for each other say so; what keeps one from starting comes with the failure
        slower = self._slower.setdefault(name, Slower(time.monotonic))
        passes, held = slower.admit()
        if held:
            self._tell(f"[dim]{name:<10} … {held} more warnings are in its log[/]")
        if passes:
            colour = "red" if line.level == "error" else "yellow"
            text = line.text if len(line.text) <= 300 else f"{line.text[:300]}…"
            self._tell(f"[{colour}]{name:<10} {line.level}[/] {escape(visible(text))}")


def memory_of(pid: int) -> int | None:
    """Bytes of a process, pages that it shares counted in part; None where the system does not tell."""
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    return None


def _reach_kafka(bootstrap: str) -> None:
    """One TCP connection to any of the brokers.

    Raises:
        CannotUp: there is none.
    """
    import socket

    why = ""
    for place in bootstrap.split(","):
        host, _, port = place.strip().rpartition(":")
        try:
            with socket.create_connection((host, int(port)), CONNECT_S):
                return
        except (OSError, ValueError) as error:
            why = str(error)
    raise CannotUp(
        f"cannot reach Kafka at {bootstrap} ({why})",
        hint="start one there, or unset POLAR_KAFKA_BOOTSTRAP to use the embedded broker",
    )


def unanswered(url: str) -> str | None:
    """Why an engine does not answer, or None where it does."""
    try:
        with urlopen(f"{url}/models", timeout=CONNECT_S):
            return None
    except (URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
