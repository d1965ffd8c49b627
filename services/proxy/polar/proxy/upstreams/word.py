"""An engine's word on its weights before a call, asked for while the log takes the call's start: it costs no time then.

Promises: the word is from before the engine is asked for the call. One that was asked for early counts only where the
call is still at that engine, which was neither paused nor met anew since, and for a moment; else it is asked for again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from polar.schemas import Engine
from polar.service.clock import Clock

from ..engine import Endpoint
from ..errors import EngineError
from .place import Place

FRESH_S = 1.0
"""The log takes milliseconds. A version that is older may be of weights that are gone."""


class _Moment(NamedTuple):
    endpoint: Endpoint
    engine: Engine | None
    pauses: int


class Word:
    """Of one call. Whoever makes it closes it."""

    def __init__(self, place: Place, clock: Clock) -> None:
        """Asks at once where the call has its seat, and the engine is known."""
        self._place = place
        self._clock = clock
        self._asked: asyncio.Task[str | None] | None = None
        self._when = self._now()
        self._since = clock.monotonic()
        if place.is_seated and self._when.engine is not None:
            self._asked = asyncio.create_task(place.endpoint.weight_version())

    async def said(self) -> str | None:
        """The word of the engine that the call is at; None where it has none.

        Raises:
            EngineError: it does not answer.
        """
        if self._asked is not None:
            asked, self._asked = self._asked, None
            early = self._clock.monotonic() - self._since <= FRESH_S
            try:
                word = await asked
            except EngineError:
                early = False
            if early and self._now() == self._when:
                return word
        return await self._place.endpoint.weight_version()

    async def close(self) -> None:
        """End what is still asked."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)

    def _now(self) -> _Moment:
        endpoint = self._place.endpoint
        return _Moment(endpoint, endpoint.engine, self._place.pauses)
