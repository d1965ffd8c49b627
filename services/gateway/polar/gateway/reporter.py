"""Sends the reports that wait in the books, in their order, until the broker has each.

At least once: a process that dies between the acknowledgement and the note of it sends a report twice, which readers
bear. A broker that is away delays reports and loses none.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import groupby

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from polar.bus import Bus, BusError, Out, RecordTooLarge
from polar.schemas import Event, StageChanged
from polar.service.logs import get_logger

from .metrics import Metrics
from .state import Books, Pending

log = get_logger(__name__)

BATCH = 200


class Reporter:
    def __init__(self, books: Books, bus: Bus, metrics: Metrics, *, backoff_max_s: float) -> None:
        self._books = books
        self._bus = bus
        self._metrics = metrics
        self._backoff_max_s = backoff_max_s
        self._progress = asyncio.Event()

    async def run(self) -> None:
        """Send until cancelled. Raises BusError where trying again cannot help."""
        while True:
            self._books.reports.clear()
            pending = await self._books.pending(BATCH)
            if not pending:
                await self._books.reports.wait()
                continue
            # one topic after the other: READY is told before RUN hears of the box
            for _, part in groupby(pending, key=lambda one: one.message.topic):
                await self._deliver(list(part))
            self._progress.set()

    async def flushed(self) -> None:
        """Return when no report of this process waits; needs `run` to be running."""
        while True:
            self._progress.clear()
            if not await self._books.pending(1):
                return
            await self._progress.wait()

    async def _deliver(self, part: list[Pending]) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_random_exponential(multiplier=0.1, max=self._backoff_max_s),
            before_sleep=_told,
            reraise=True,
        ):
            with attempt:
                outs = [Out(one.message.topic, one.message.key, one.message.value) for one in part]
                try:
                    await self._bus.send(*outs)
                except RecordTooLarge as error:
                    log.error("a report is too large and goes without its details", error=str(error))
                    await self._bus.send(*[replace(out, value=reduced(out.value)) for out in outs])
        await self._books.sent([one.number for one in part])
        self._metrics.reports.inc(len(part))


def reduced(event: Event | None) -> Event | None:
    """A report without its long parts, for a record size that is set very low: an ending must not vanish."""
    if not isinstance(event, StageChanged):
        return event
    failure = event.failure and msgspec.structs.replace(
        event.failure, message=event.failure.message[:500], detail={"reduced": "the report was too large"}
    )
    exit_ = event.exit and msgspec.structs.replace(event.exit, output_tail="")
    return msgspec.structs.replace(event, failure=failure, exit=exit_, artifacts=[])


def _told(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("reports wait for the broker", error=str(error), tries=state.attempt_number)
