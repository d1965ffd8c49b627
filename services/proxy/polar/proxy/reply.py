"""A streamed answer to a client: headers as late as its client allows, keep-alives while nothing else is said.

Until the first byte an error still has its own status; after it, an error is an event. It knows aiohttp and no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Protocol

from aiohttp import web

from polar.service.clock import Clock

from .errors import ClientGone, as_told

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Keepalive(Protocol):
    def keepalive(self, beat: int) -> bytes: ...


class StreamedReply:
    """`async with` runs the keep-alives; they end with it.

    `before_early` is asked before headers go out with nothing to say, and whether they may.
    """

    def __init__(
        self,
        request: web.Request,
        encoder: Keepalive,
        clock: Clock,
        *,
        headers: Mapping[str, str],
        early_headers_after: float,
        keepalive_every: float,
        before_early: Callable[[], Awaitable[bool]],
    ) -> None:
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._request = request
        self._encoder = encoder
        self._clock = clock
        self._first = early_headers_after
        self._every = keepalive_every
        self._before_early = before_early
        self._lock = asyncio.Lock()
        self._said = clock.monotonic()
        self._shut = False
        self._beats: asyncio.Task[None] | None = None

    async def silent(self) -> bool:
        """Whether the client has nothing yet; it gets nothing from here then, so that an error can be the answer."""
        async with self._lock:
            self._shut = not self.opened
            return self._shut

    @property
    def opened(self) -> bool:
        """Whether the client has its status."""
        return self.response.prepared

    async def __aenter__(self) -> StreamedReply:
        self._beats = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._beats is not None
        self._beats.cancel()
        (ended,) = await asyncio.gather(self._beats, return_exceptions=True)
        if isinstance(ended, Exception):
            as_told(ended)  # logs it: without keep-alives a client may give up, and nothing else would say why

    async def send(self, data: bytes) -> None:
        """Write, with the headers before it the first time. Raises `ClientGone`."""
        async with self._lock:
            await self._write(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        """Write the last events and end the answer. Raises `ClientGone`."""
        async with self._lock:
            await self._write(data, last=True)
        return self.response

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if self._shut:
            return
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            if last:
                await self.response.write_eof(data)
            else:
                await self.response.write(data)
        except OSError as error:
            raise ClientGone("the client closed its connection") from error
        self._said = self._clock.monotonic()

    async def _beat(self) -> None:
        await self._clock.sleep(self._first)
        if not self.opened and not await self._before_early():
            return  # the call ends with an error, which is its answer
        beat = 0
        try:
            while True:
                quiet = self._clock.monotonic() - self._said
                if not self.opened or quiet >= self._every:
                    await self.send(self._encoder.keepalive(beat))
                    beat += 1
                    quiet = 0.0
                await self._clock.sleep(max(self._every - quiet, 0.01))
        except ClientGone:
            return  # the client is gone, and the handler is told so by its cancellation


async def finished(request: web.Request, response: web.Response) -> bool:
    """Write a whole answer; whether its client was there to the end."""
    try:
        await response.prepare(request)
        await response.write_eof()
    except OSError:
        return False
    return await handed_over(request)


async def handed_over(request: web.Request) -> bool:
    """Wait until the operating system has all that was written; whether the connection still stands then."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size():
        # by itself it goes on buffering, and a connection that breaks then breaks unseen
        transport.set_write_buffer_limits(high=0)
        try:
            await request.writer.drain()
        except OSError:
            return False
        finally:
            transport.set_write_buffer_limits()
    return transport is not None and request.transport is transport and not transport.is_closing()
