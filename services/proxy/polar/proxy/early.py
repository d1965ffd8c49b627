"""What happens to a call that is still silent when its client's headers can wait no longer.

Once a status of 200 is out, an error cannot have one of its own. So the prompt is counted first: one that is too long
is refused as such, and the count is what the client is told as its input. It knows neither dialects nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from .calls import Call
from .engine import Count, Endpoint
from .errors import EngineError, EngineRefused, PromptTooLong, ProxyError

COUNT_WITHIN_S = 5.0
"""A client was seen to give up after 60 s without headers; an engine that counts takes milliseconds."""


class Stop:
    """Ends what a task is doing with an error, from another task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: ProxyError | None = None

    def __call__(self, error: ProxyError) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    @contextmanager
    def here(self) -> Iterator[None]:
        """The body may be ended by a call of this object, and raises its error then."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        try:
            yield
        except asyncio.CancelledError:
            if self._error is None or task.uncancel() > 0:
                raise  # the client left, perhaps besides
            raise self._error from None
        finally:
            self._task = None


class Prompted(Protocol):
    def prompt(self, tokens: int) -> None: ...


async def count_first(counted: Callable[[], Awaitable[Count]], encoder: Prompted, stop: Stop) -> bool:
    """Count the prompt and tell `encoder`, or stop the call; whether headers may go out.

    An engine that cannot count does not hold them up. Not for images, which are counted by their text alone: no count.
    """
    try:
        async with asyncio.timeout(COUNT_WITHIN_S):
            count = await counted()
    except EngineRefused as error:
        stop(error)
        return False
    except (EngineError, TimeoutError):
        return True
    if count.limit is not None and count.tokens >= count.limit:
        stop(PromptTooLong("The prompt is longer than the model takes.", tokens=count.tokens, limit=count.limit))
        return False
    encoder.prompt(count.tokens)
    return True


async def measured(error: PromptTooLong, endpoint: Endpoint, call: Call) -> PromptTooLong:
    """`error` with the prompt's length, which engines do not tell: clients shorten by what they are told."""
    try:
        count = await endpoint.count(call)
    except EngineError:
        return error
    limit = endpoint.max_model_len if count.limit is None else count.limit
    return PromptTooLong(error.message, tokens=count.tokens, limit=limit)
