"""Carries out a schedule on a running installation, paced by the engine's finished calls.

No call finishes between the moment a fault is due and the moment it has happened, so work cannot run ahead of the
schedule, and a fault always finds a call in flight. What it took away comes back by itself after its time.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .brokers import KillableBroker
from .installation import SUBMITS, Installation
from .pace import UNLIMITED, PacedEngine
from .schedule import BROKER, Fault

STUCK_S = 180.0
"""Without one more finished call or trajectory for so long, nothing will come any more."""


@dataclass(frozen=True)
class Happened:
    """A fault that was carried out."""

    fault: Fault
    name: str
    """The process that had the role."""
    finished: int
    """Engine calls that had finished."""
    in_flight: int
    """Calls at the engine when it happened."""


class Chaos:
    """See the module. One at a time per installation; `run` it, then read `happened`."""

    def __init__(self, stack: Installation, broker: KillableBroker, engine: PacedEngine) -> None:
        self._stack = stack
        self._broker = broker
        self._engine = engine
        self._coming_back: dict[str, asyncio.Task[None]] = {}
        self.happened: list[Happened] = []

    async def run(self, schedule: Sequence[Fault]) -> None:
        """Every fault, and until all that was taken away is back.

        Raises:
            AssertionError: work stands still, or a process ended that nobody killed.
        """
        try:
            async with asyncio.TaskGroup() as self._returns:
                for fault in schedule:
                    self._engine.pace.allow(fault.after)
                    await self._due(fault)
                    await self._carry_out(fault)
        finally:
            self._engine.pace.allow(UNLIMITED)

    async def _due(self, fault: Fault) -> None:
        """Until so many calls have finished, and the next one is under way."""
        stats = self._engine.stats
        await moving(
            self._stack,
            lambda: stats.finished + (stats.running > 0),
            lambda _: stats.finished >= fault.after and stats.running > 0,
            f"waiting for: {fault}",
        )

    async def _carry_out(self, fault: Fault) -> None:
        name = self._holder(fault.target)
        before = self._coming_back.pop(name, None)
        if before is not None:
            await before
        stats = self._engine.stats
        self.happened.append(Happened(fault, name, stats.finished, stats.running))
        if fault.target == BROKER:
            await self._broker.kill()
        elif fault.what == "kill":
            code = await asyncio.to_thread(self._stack.kill, name, signal.SIGKILL)
            assert code == -signal.SIGKILL, f"{name} had ended with {code} before it was killed\n{self._stack.tails()}"
        else:
            await asyncio.to_thread(self._stack.pause, name)
        self._coming_back[name] = self._returns.create_task(self._bring_back(fault, name))

    async def _bring_back(self, fault: Fault, name: str) -> None:
        await asyncio.sleep(fault.seconds)
        if fault.target == BROKER:
            await self._broker.start()
        elif fault.what == "kill":
            await asyncio.to_thread(self._stack.restart, name)
        else:
            self._stack.resume(name)

    def _holder(self, target: str) -> str:
        if target not in ("leader", "standby"):
            return target
        leader = self._stack.leader() or SUBMITS[0]
        return leader if target == "leader" else next(name for name in SUBMITS if name != leader)


async def moving(
    stack: Installation, progress: Callable[[], int], done: Callable[[int], bool], what: str, stuck_s: float = STUCK_S
) -> None:
    """Wait until `done(progress())`.

    Raises:
        AssertionError: with what every process said last, if nothing moves for `stuck_s`, or a process has ended.
    """
    loop = asyncio.get_running_loop()
    seen, since = progress(), loop.time()
    while not done(seen):
        if ended := stack.ended():
            raise AssertionError(f"{', '.join(ended)} ended by itself, {what}\n{stack.tails()}")
        if loop.time() - since > stuck_s:
            raise AssertionError(f"{seen} for {stuck_s:g} s, {what}\n{stack.tails()}")
        await asyncio.sleep(0.02)
        now = progress()
        if now != seen:
            seen, since = now, loop.time()
