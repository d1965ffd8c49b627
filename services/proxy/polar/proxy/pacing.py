"""How often a stream is read on: what comes in between is taken together.

An engine writes each token by itself, and each that is told by itself costs a wake-up, an event and a packet. Taken
together where they come close upon one another, a reply of 100 tokens a second costs a quarter less CPU. The end waits
for nothing: it is what a harness goes on from. It knows aiohttp's reader and nothing of what is read.
"""

from __future__ import annotations

import asyncio

import aiohttp


class Pacing:
    """Of one stream. `step`: seconds; 0: none."""

    def __init__(self, content: aiohttp.StreamReader, step: float) -> None:
        self._step = step
        self._ended = False
        self._over: asyncio.Future[None] | None = None
        content.on_eof(self._end)

    async def pause(self) -> None:
        """Return after a step, at once when everything has come."""
        if self._ended or not self._step:
            return
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        timer = loop.call_later(self._step, self._wake)
        try:
            await self._over
        finally:
            timer.cancel()
            self._over = None

    def _wake(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self._wake()
