"""What the proxy's tests share: a running proxy, a bus that can be held back, readers of what is on the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai

from polar.bus import Bus, BusError, Out
from polar.proxy import ProxyService
from polar.schemas import (
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    ControlState,
    Event,
    RecordRef,
    SamplingSpec,
    SessionControl,
)
from polar.service.clock import SystemClock
from polar.service.tokens import SessionToken, sign_session

SECRET = "a secret of the tests, and long enough for HS256"
ENDS = (CompletionCaptured, CompletionFailed)


class GatedSender:
    """A bus whose acknowledgements can be withheld, by the type of the record; or that fails."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._gates: dict[type[Event], asyncio.Event] = {}
        self.failing: dict[type[Event], BusError] = {}
        self.waiting: set[type[Event]] = set()
        self.sent: list[Event] = []

    def withhold(self, kind: type[Event]) -> asyncio.Event:
        """Records of `kind` are sent once the event returned is set."""
        return self._gates.setdefault(kind, asyncio.Event())

    async def send(self, *outs: Out) -> list[RecordRef]:
        kind = type(outs[0].value)
        assert outs[0].value is not None
        self.sent.append(outs[0].value)
        if kind in self.failing:
            raise self.failing[kind]
        if kind in self._gates:
            self.waiting.add(kind)
            await self._gates[kind].wait()
        return await self._bus.send(*outs)


class Door:
    """A running proxy and what a test asks of it."""

    def __init__(self, service: ProxyService, bus: Bus, scheduler: Bus, sender: GatedSender) -> None:
        self.service = service
        self.bus = bus
        self.scheduler = scheduler
        self.sender = sender
        self.url = f"http://127.0.0.1:{service.port}"
        self.closing = AsyncExitStack()
        """What ends with the test, before the proxy does."""

    def token(self, session: str = "s1", **changes: Any) -> SessionToken:
        values: dict[str, Any] = {
            "session_id": session,
            "attempt": 1,
            "task_id": "t1",
            "group_id": "g1",
            "sample": 2,
            "model": "the-policy",
            "sampling": SamplingSpec(),
            "tenant": "default",
            "harness": "shell",
            "not_after_ms": SystemClock().now_ms() + 600_000,
        }
        return SessionToken(**(values | changes))

    def key(self, session: str = "s1", **changes: Any) -> str:
        return sign_session(self.token(session, **changes), SECRET)

    def client(self, session: str = "s1", *, key: str | None = None, **changes: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key(session, **changes), max_retries=0, timeout=30
        )

    async def records(self, session: str = "s1") -> list[Any]:
        """The session's records on the log by now."""
        reader = await self.bus.reader(["completions"], committed=True)
        try:
            return [one.value async for one in reader.to_end() if one.key == session]
        finally:
            await reader.close()

    async def settled(self, session: str = "s1") -> list[Any]:
        """The session's records once no call holds a slot."""
        async with asyncio.timeout(30):
            await self.service.slots.all_free()
        return await self.records(session)

    async def control(self, session: str, state: ControlState, attempt: int = 1) -> None:
        """Write to `polar.control` and wait until the proxy knows."""
        at_ms = SystemClock().now_ms()
        event = SessionControl(session_id=session, state=state, attempt=attempt, at_ms=at_ms)
        await self.scheduler.send(Out("control", session, event))
        async with asyncio.timeout(20):
            while self.service.sessions.control(session) != event:  # noqa: ASYNC110 - the proxy tells nobody of it
                await asyncio.sleep(0.02)


async def ask(client: openai.AsyncOpenAI, *, stream: bool, seen: list[Any] | None = None, **fields: Any) -> None:
    """One call to its end; `seen` gets its chunks."""
    answer = await client.chat.completions.create(**({"model": "m", "stream": stream} | fields))
    if stream:
        await rest_of(answer, seen)


async def rest_of(stream: Any, seen: list[Any] | None = None) -> None:
    """Read a stream to its end."""
    async for chunk in stream:
        if seen is not None:
            seen.append(chunk)


def finished(seen: list[Any]) -> bool:
    """Whether a client was told that a choice has ended."""
    return any(choice.finish_reason is not None for chunk in seen for choice in chunk.choices)


def one_call(records: list[Any]) -> CompletionCaptured | CompletionFailed:
    """The end of the one call on the log; a bracket is a start and one end."""
    start, end = records
    assert isinstance(start, CallStarted)
    assert isinstance(end, ENDS)
    assert start.completion_id == end.completion_id
    assert (start.session_id, start.attempt, start.call) == (end.session_id, end.attempt, end.call)
    return end


def captured(records: list[Any]) -> CompletionCaptured:
    end = one_call(records)
    assert isinstance(end, CompletionCaptured), end
    return end


def failed(records: list[Any]) -> CompletionFailed:
    end = one_call(records)
    assert isinstance(end, CompletionFailed), end
    return end


@asynccontextmanager
async def running(service: ProxyService) -> AsyncIterator[ProxyService]:
    """The service in a task of its own, ready."""
    task = asyncio.create_task(service.run())
    ready = asyncio.create_task(service.ready.wait())
    try:
        await asyncio.wait({task, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        assert service.ready.is_set()
        yield service
    finally:
        for one in (task, ready):
            one.cancel()
        await asyncio.gather(task, ready, return_exceptions=True)
