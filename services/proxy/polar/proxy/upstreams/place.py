"""A call's place at an engine: it waits there, moves on where the engine goes away, and holds a seat while it is asked.

The wait is part of the call, so a streaming client is kept alive meanwhile; it ends with the place's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..engine import Endpoint
from ..errors import EngineAway, EngineError, EngineUnfit, ModelUnknown, Overloaded, ProxyError
from .line import Full

if TYPE_CHECKING:
    from .engines import Engines
    from .upstream import Upstream


class Place:
    """One call's. Making it takes a seat or begins the wait, at once.

    Raises:
        Overloaded: neither is possible.
    """

    def __init__(self, engines: Engines, session_id: str, model: str, upstream: Upstream) -> None:
        self.cut: Callable[[ProxyError], None] = lambda error: None
        """Ends the call with an error; set by the call."""
        self.left = False
        self._engines = engines
        self._session_id = session_id
        self._model = model
        self._upstream = upstream
        self._turn = asyncio.Event()
        self._failure: ProxyError | None = None
        self._deadline: float | None = None
        self._join(upstream)

    @property
    def endpoint(self) -> Endpoint:
        """The engine it is at now."""
        return self._upstream.endpoint

    @property
    def is_seated(self) -> bool:
        return self._turn.is_set() and self._failure is None and not self.left

    @property
    def pauses(self) -> int:
        """How often its engine was seen to be paused; grows."""
        return self._upstream.pauses

    async def seated(self) -> Endpoint:
        """Wait for a seat.

        Raises:
            Overloaded: none came free in time, or the wait moved to where nobody more may wait.
        """
        clock, limit = self._engines.clock, self._engines.settings.engine_wait
        if self._deadline is None:
            self._deadline = clock.monotonic() + limit
        if not self._turn.is_set():
            try:
                async with asyncio.timeout(max(self._deadline - clock.monotonic(), 0)):
                    await self._turn.wait()
            except TimeoutError:
                raise self._engines.too_long(self._upstream) from None
        if self._failure is not None:
            raise self._failure
        return self.endpoint

    def turn(self) -> None:
        """The line's word that it sits."""
        self._turn.set()

    def move(self) -> bool:
        """Go to the session's next engine, if there is one in rotation; whether it did."""
        if self.left:
            return False
        try:
            upstream = self._engines.of(self._session_id, self._model)
        except ProxyError as error:
            self._end(error)
            return True
        if upstream is self._upstream or not upstream.usable:
            return False
        self._leave()
        self._turn.clear()
        try:
            self._join(upstream)
        except Overloaded as error:
            self._end(error)
        return True

    async def again(self, error: EngineAway | ModelUnknown) -> bool:
        """Whether a call that an engine has not begun with may be asked once more: elsewhere, or after a pause."""
        if self._deadline is not None and self._engines.clock.monotonic() >= self._deadline:
            return False
        if isinstance(error, EngineUnfit | ModelUnknown) or error.untouched:
            return self.move()
        upstream = self._upstream
        try:
            paused = await upstream.endpoint.paused()
        except EngineError:
            return False
        if not paused:
            return False
        upstream.seen_paused(True, self._engines.clock.monotonic())
        self._leave()
        self._turn.clear()
        self._join(upstream)
        return True

    def leave(self) -> None:
        """Free the seat, or end the wait; once is enough."""
        if not self.left:
            self.left = True
            self._leave()

    def _end(self, error: ProxyError) -> None:
        self._leave()
        self._failure = error
        self._turn.set()

    def _join(self, upstream: Upstream) -> None:
        self._upstream = upstream
        try:
            seated = upstream.line.join(self)
        except Full:
            raise self._engines.full(upstream) from None
        if seated:
            self._turn.set()
        upstream.tell()

    def _leave(self) -> None:
        self._upstream.line.leave(self)
        self._upstream.tell()
