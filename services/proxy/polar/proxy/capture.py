"""The bracket around a call on `polar.completions`: `CallStarted`, then exactly one end.

Promises:

- Nothing is generated before the broker has acknowledged `CallStarted`.
- `capture` returns only after the broker has acknowledged `CompletionCaptured`: whoever tells a client anything that
  closes something does it after that.
- Every bracket gets one end, unless the process dies: also when the handler is cancelled, when its code fails, and when
  the broker was away. An end whose acknowledgement is missing is sent again as it is; readers drop a second record with
  the same completion id.
- `acknowledged` is told where the capture stands, also where whoever wrote it has given up waiting.
- A bracket holds its slot until its end is written, so that what waits for an absent broker is bounded.

It does not know HTTP, dialects or engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from polar.bus import BusError, Out, RecordTooLarge
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed, Failure, FailureKind, RecordRef
from polar.service.clock import Clock
from polar.service.logs import get_logger

from .errors import ClientGone, LogAway, ProxyError, RecordRefused

TOPIC = "completions"
Acknowledged = Callable[[RecordRef], None]
Result = TypeVar("Result")
log = get_logger(__name__)


class Sender(Protocol):
    """The one thing needed of the bus; tests hold it back here."""

    async def send(self, *outs: Out) -> list[RecordRef]: ...


class Recorder:
    """Writes brackets. Owns every task that still has an end to write; `close` waits for them."""

    def __init__(
        self, sender: Sender, clock: Clock, *, start_timeout: float, capture_timeout: float, retry_for: float
    ) -> None:
        self.sender = sender
        self.clock = clock
        self.start_timeout = start_timeout
        self.capture_timeout = capture_timeout
        self.retry_for = retry_for
        self.left_open = 0
        """Calls whose end was given up."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pending(self) -> int:
        """Starts and ends that are being written."""
        return len(self._tasks)

    def own(self, task: asyncio.Task[Result]) -> asyncio.Task[Result]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it has it; a client that left does not

    async def close(self, timeout: float) -> None:
        """Wait for what is being written, then give the rest up."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Bracket:
    """One call. `async with` opens it; leaving it writes the end that its body has not written.

    `settled` is called once nothing of this call is left to write. `answered` says whether the client has its status
    already, which is then 200 whatever the failure; else `status` says what its dialect makes of an error's, None where
    there is no client.
    """

    def __init__(
        self,
        recorder: Recorder,
        started: CallStarted,
        settled: Callable[[], None],
        *,
        answered: Callable[[], bool] = lambda: False,
        status: Callable[[ProxyError], int | None] = lambda error: error.status,
    ) -> None:
        self.started = started
        self._recorder = recorder
        self._settled = settled
        self._answered = answered
        self._status = status
        self._at: RecordRef | None = None
        self._start: asyncio.Task[RecordRef] | None = None
        self._end: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Bracket:
        recorder = self._recorder
        self._start = recorder.own(asyncio.create_task(self._write_start()))
        try:
            async with asyncio.timeout(recorder.start_timeout):
                self._at = await asyncio.shield(self._start)
        except (BusError, TimeoutError) as error:
            away = LogAway("the log did not take the call in time; nothing was generated, try again")
            self._fail(away)
            raise away from error
        except BaseException as error:
            self._fail(error)
            raise
        return self

    @property
    def at(self) -> RecordRef:
        """Where `CallStarted` stands.

        Raises:
            RuntimeError: it is not acknowledged.
        """
        if self._at is None:
            raise RuntimeError(f"call {self.started.completion_id} has not begun")
        return self._at

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._end is None:
            self._fail(error or RuntimeError("a call ended without its end"))

    async def capture(self, captured: CompletionCaptured, acknowledged: Acknowledged | None = None) -> None:
        """Write the capture and wait for the broker's word.

        Raises:
            LogAway: none came in time. The record is sent on; the client must not be told the reply.
            RecordRefused: it is over `max_record_bytes`; a `CompletionFailed` is written instead.
        """
        task = self.capture_soon(captured, acknowledged)
        try:
            async with asyncio.timeout(self._recorder.capture_timeout):
                await asyncio.shield(task)
        except (BusError, TimeoutError) as error:
            if isinstance(error, BusError) and not error.retryable:
                raise RecordRefused(f"the reply could not be recorded: {error}", status=500) from error
            raise LogAway("the log did not take the reply in time; try again") from error

    def capture_soon(
        self, captured: CompletionCaptured, acknowledged: Acknowledged | None = None
    ) -> asyncio.Task[None]:
        """As `capture`, without waiting: for a client that is gone."""
        return self._write(captured, acknowledged)

    def _fail(self, error: BaseException) -> None:
        started = self.started
        failure, status = describe(error)
        if isinstance(error, ProxyError) and status is not None:
            status = self._status(error)
        ended = CompletionFailed(
            completion_id=started.completion_id,
            session_id=started.session_id,
            attempt=started.attempt,
            call=started.call,
            failure=failure,
            http_status=200 if status is not None and self._answered() else status,
            at_ms=self._recorder.clock.now_ms(),
        )
        self._write(ended)

    def _write(
        self, end: CompletionCaptured | CompletionFailed, acknowledged: Acknowledged | None = None
    ) -> asyncio.Task[None]:
        if self._end is not None:
            raise RuntimeError(f"call {self.started.completion_id} has its end already")
        self._end = self._recorder.own(asyncio.create_task(self._write_end(end, acknowledged)))
        self._end.add_done_callback(lambda _: self._settled())
        return self._end

    async def _write_start(self) -> RecordRef:
        (at,) = await self._recorder.sender.send(Out(TOPIC, self.started.session_id, self.started))
        return at

    async def _write_end(self, end: CompletionCaptured | CompletionFailed, acknowledged: Acknowledged | None) -> None:
        assert self._start is not None
        # a start without acknowledgement may be on the log all the same, so it gets its end too
        await asyncio.wait([self._start])
        try:
            at = await self._send(end)
        except RecordTooLarge as error:
            if isinstance(end, CompletionFailed):
                raise
            refused = RecordRefused(f"the reply does not fit a record ({error.size} bytes, limit {error.limit})")
            await self._send(
                CompletionFailed(
                    completion_id=end.completion_id,
                    session_id=end.session_id,
                    attempt=end.attempt,
                    call=end.call,
                    failure=refused.failure(),
                    http_status=refused.status,
                    at_ms=end.ended_ms,
                )
            )
            raise refused from error
        if acknowledged is not None:
            acknowledged(at)

    async def _send(self, end: CompletionCaptured | CompletionFailed) -> RecordRef:
        recorder = self._recorder
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            stop=stop_after_delay(recorder.retry_for),
            sleep=recorder.clock.sleep,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    (at,) = await recorder.sender.send(Out(TOPIC, end.session_id, end))
        except RecordTooLarge:
            raise
        except BaseException as error:
            recorder.left_open += 1
            log.error("call left open", completion=end.completion_id, error=f"{type(error).__name__}: {error}")
            raise
        return at


def describe(error: BaseException) -> tuple[Failure, int | None]:
    """What a `CompletionFailed` says of an error, and the status that the client got."""
    if isinstance(error, ProxyError) and not isinstance(error, ClientGone):
        return error.failure(), error.status
    if isinstance(error, asyncio.CancelledError | ClientGone):
        return Failure(kind=FailureKind.CANCELLED, message="the client went away before the reply was whole"), None
    # the type only: a message may quote what must not be logged
    return Failure(kind=FailureKind.INFRA, message=f"the proxy failed: {type(error).__name__}", retryable=True), 500
