"""An engine that lets exactly so many calls finish: the clock of a schedule that counts work.

Calls beyond the limit wait at the engine, started and unanswered, which is where a fault should find them. A call that
is broken off takes nothing from the limit.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from polar.devmodel import Reply, Script, ScriptedEngine
from polar.devmodel.engine import Call, Generation

GATE = "pace"
UNLIMITED = 2**62


class Pace(asyncio.Event):
    """A gate for the script's replies that opens call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 0
        self._finished = 0
        self._passing: set[asyncio.Task[object] | None] = set()
        """Calls that were let through and have not ended; each is the task that answers it."""

    async def wait(self) -> Literal[True]:
        while self._finished + len(self._passing) >= self.limit:
            self.clear()
            await super().wait()
        self._passing.add(asyncio.current_task())
        return True

    def allow(self, limit: int) -> None:
        """Let calls through until so many have finished in all."""
        self.limit = limit
        self.set()

    def ended(self, *, finished: bool) -> None:
        """A call has ended; its task says so."""
        self._finished += finished
        self._passing.discard(asyncio.current_task())
        self.set()


class PacedEngine(ScriptedEngine):
    """A scripted engine of which no call finishes before `pace.allow` says so. No two of its answers are the same."""

    def __init__(self) -> None:
        super().__init__(Script(default=Reply(text="Answer $call to $last_user.", template=True, gate=GATE)))
        self.pace = Pace()
        self.scripted.gates[GATE] = self.pace

    def on_end(self, call: Call, generation: Generation, outcome: str) -> None:
        super().on_end(call, generation, outcome)
        if self.scripted.is_probe(call):
            return  # the proxy's self-test: neither paced nor counted
        self.pace.ended(finished=outcome == "finished")
