"""The bracket: one start, one end, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from polar.bus import BrokerUnavailable, BusError, Out
from polar.proxy.capture import Bracket, Recorder
from polar.proxy.errors import LogAway, RecordRefused
from polar.schemas import (
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    Engine,
    Prompt,
    RecordRef,
    Sampling,
    TokenIds,
)
from polar.service.clock import SystemClock

STARTED = CallStarted(completion_id="c", session_id="s", attempt=1, call=0, dialect="d", at_ms=1)
CAPTURED = CompletionCaptured(
    completion_id="c",
    session_id="s",
    attempt=1,
    task_id="t",
    group_id="g",
    sample=0,
    call=0,
    started_ms=1,
    ended_ms=2,
    dialect="d",
    request_sha256="",
    prompt=Prompt(ids=TokenIds([1])),
    choices=[],
    sampling_asked=Sampling(),
    sampling=Sampling(),
    engine=Engine(model="m", endpoint="e"),
)


class Log:
    """Takes records after a few turns of the loop; fails as often as told to."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._failures = 0
        self._retryable = True

    def fail(self, times: int, *, retryable: bool = True) -> None:
        self._failures, self._retryable = times, retryable

    async def send(self, *outs: Out) -> list[RecordRef]:
        for _ in range(3):
            await asyncio.sleep(0)
        if self._failures:
            self._failures -= 1
            raise BrokerUnavailable("away") if self._retryable else BusError("refused", retryable=False)
        self.records += [out.value for out in outs]
        return [RecordRef(topic="completions", partition=0, offset=len(self.records) - 1)]


def recorder(log: Log, **changes: float) -> Recorder:
    return Recorder(log, SystemClock(), **{"start_timeout": 5, "capture_timeout": 5, "retry_for": 30} | changes)


async def call(
    owner: Recorder, settled: asyncio.Event, *, captures: int = 1, between: Callable[[], None] = lambda: None
) -> None:
    async with Bracket(owner, STARTED, settled.set) as bracket:
        between()
        for _ in range(3):
            await asyncio.sleep(0)
        for _ in range(captures):
            await bracket.capture(CAPTURED)


@pytest.mark.parametrize("turns", range(16))
async def test_a_call_that_is_cancelled_anywhere_has_one_end(turns: int) -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log)
    task = asyncio.create_task(call(owner, settled))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await owner.close(5)
    if log.records:
        start, end = log.records
        assert start is STARTED
        assert isinstance(end, CompletionCaptured | CompletionFailed)
        assert settled.is_set()
    else:
        assert turns == 0  # the handler never ran


@pytest.mark.parametrize("error", [ValueError("a secret"), LogAway("x"), KeyboardInterrupt()])
async def test_a_body_that_fails_has_one_end_without_the_errors_text(error: BaseException) -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log)
    with pytest.raises(type(error)):
        async with Bracket(owner, STARTED, settled.set):
            raise error
    await owner.close(5)
    assert isinstance(log.records[1], CompletionFailed)
    assert "secret" not in log.records[1].failure.message


async def test_a_second_end_is_a_mistake() -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log)
    with pytest.raises(RuntimeError):
        await call(owner, settled, captures=2)
    assert log.records == [STARTED, CAPTURED]


async def test_an_end_is_sent_until_it_is_acknowledged() -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log)
    await call(owner, settled, between=lambda: log.fail(2))
    assert log.records == [STARTED, CAPTURED]
    assert owner.pending == 0


async def test_an_end_that_is_refused_for_good_is_counted() -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log)
    with pytest.raises(RecordRefused):
        await call(owner, settled, between=lambda: log.fail(1, retryable=False))
    await owner.close(5)
    assert owner.left_open == 1
    assert settled.is_set()


async def test_closing_gives_up_after_its_time() -> None:
    log, settled = Log(), asyncio.Event()
    owner = recorder(log, capture_timeout=0.05)
    with pytest.raises(LogAway):
        await call(owner, settled, between=lambda: log.fail(1_000_000))
    assert not settled.is_set()
    await owner.close(0.05)
    assert (owner.pending, owner.left_open) == (0, 1)
    assert settled.is_set()
