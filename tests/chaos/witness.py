"""Follows topics of an installation from their beginning: what a test waits for is what the log says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from polar.bus import Reader, Record
from polar.client import PolarClient
from polar.schemas import (
    AttemptFenced,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    Event,
    SessionClosed,
    SessionFinal,
    SessionOpened,
)

from .faults import STUCK_S
from .installation import Installation

E = TypeVar("E", bound=Event)
T = TypeVar("T")

Life = (
    SessionOpened | CallStarted | CompletionCaptured | CompletionFailed | AttemptFenced | SessionClosed | SessionFinal
)


class Witness:
    """Every record of some topics so far, in log order within each partition."""

    def __init__(self, reader: Reader, stack: Installation) -> None:
        self.records: list[Record] = []
        self._reader = reader
        self._stack = stack

    async def until(self, holds: Callable[[], T], what: str, stuck_s: float = STUCK_S) -> T:
        """Read on until `holds` is true of `records`; what it found.

        Raises:
            AssertionError: with what every process said last, if it does not come, or a process has ended.
        """
        try:
            async with asyncio.timeout(stuck_s):
                while not (found := holds()):
                    if ended := self._stack.ended():
                        raise AssertionError(f"{', '.join(ended)} ended by itself, waiting: {what}\n{self._tails()}")
                    self.records += await self._reader.poll(timeout_s=0.1)
        except TimeoutError:
            raise AssertionError(f"not within {stuck_s:g} s: {what}\n{self._tails()}") from None
        return found

    async def to_end(self) -> None:
        """Everything that is on the log now."""
        async for record in self._reader.to_end():
            self.records.append(record)

    def all(self, kind: type[E], **fields: object) -> list[E]:
        """Values of a type whose attributes are these."""
        found = [record.value for record in self.records if isinstance(record.value, kind)]
        return [one for one in found if all(getattr(one, name) == value for name, value in fields.items())]

    def life(self, session_id: str) -> list[tuple[int, Life]]:
        """What `completions` says of a session: offsets and values."""
        return [
            (record.offset, record.value)
            for record in self.records
            if isinstance(record.value, Life) and record.value.session_id == session_id
        ]

    def _tails(self) -> str:
        seen = [f"{one.topic}/{one.partition}/{one.offset} {type(one.value).__name__}" for one in self.records[-20:]]
        return "\n".join(["--- the log", *seen, self._stack.tails()])


@asynccontextmanager
async def witnessing(client: PolarClient, stack: Installation, *topics: str) -> AsyncIterator[Witness]:
    reader = await client.bus.reader(topics)
    try:
        yield Witness(reader, stack)
    finally:
        await reader.close()
