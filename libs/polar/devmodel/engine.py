"""A running call and the interface between the HTTP surface and what generates.

A backend yields bursts of sampled tokens; `Generation` runs one task per choice, turns bursts into deltas and hands
them to the one consumer in the order they came. Whoever uses a `Generation` as a context manager owns those tasks:
none outlives it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from .chat import ChatTokenizer
from .choice import Burst, Choice, Delta
from .errors import EngineError
from .lifecycle import Lifecycle
from .request import ChatRequest, Sampling

QUEUE = 64  # deltas that may wait for a slow client before its generation stops to wait too


class Disconnect(EngineError):
    """A script wants the connection cut here: closed, or reset."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__("scripted disconnect")
        self.reset = reset


@dataclass(slots=True, eq=False)
class Call:
    """One call as a backend sees it. `max_tokens` is resolved: what may be sampled at most."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    request: ChatRequest | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tamper: Callable[[dict[str, Any]], dict[str, Any] | str] | None = None
    """Changes an outgoing body or chunk; a string is sent as it is."""
    tokens: Any = None
    """What a call of the generate route asks for besides (`scaleout.TokensIn`)."""
    plan: Any = None
    """Whatever the backend made of the call in `prepare`."""

    def for_choice(self, index: int) -> Sampling:
        """The sampling of choice `index`: like vLLM, each choice of a seeded call has the next seed."""
        seed = self.sampling.seed
        return self.sampling if seed is None or index == 0 else replace(self.sampling, seed=seed + index)


class Backend(Protocol):
    """What generates. Used from one event loop; anything heavy runs elsewhere."""

    model: str
    max_model_len: int
    chat: ChatTokenizer
    reasoning: bool

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def prepare(self, call: Call) -> None:
        """Look at a call before anything is answered; raise `ApiError` to refuse it."""

    def generate(self, call: Call, index: int) -> AsyncGenerator[Burst, None]:
        """Sample choice `index`. Closing the iterator ends the work."""


class Generation:
    """All choices of one call, running."""

    def __init__(self, backend: Backend, call: Call, lifecycle: Lifecycle) -> None:
        self.id = call.id
        self.call = call
        self.failed = False
        """Set when the answer ended with an error inside its stream."""
        request = call.request
        self.choices = [
            Choice(i, call.sampling, call.max_tokens, backend.chat, request=request, reasoning=backend.reasoning)
            for i in range(request.n if request else call.tokens.n if call.tokens else 1)
        ]
        self._backend = backend
        self._lifecycle = lifecycle
        self._queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue(QUEUE)
        self._tasks: list[asyncio.Task[None]] = []
        self._aborted = False

    async def __aenter__(self) -> "Generation":
        self._tasks = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """End every choice now, with finish `abort` and what it has."""
        self._aborted = True
        for task in self._tasks:
            task.cancel()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every delta of every choice; ends when all choices have. Raises what the backend raised."""
        open_choices = len(self.choices)
        while open_choices:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            open_choices -= item.finish is not None
            yield item

    async def _pump(self, choice: Choice) -> None:
        try:
            await self._generate(choice)
        except asyncio.CancelledError:
            if not self._aborted:
                raise
        except Exception as error:  # noqa: BLE001 - whatever the backend raises is the consumer's to answer
            await self._queue.put(error)
            return
        if choice.finish is None:
            await self._queue.put(choice.end("abort"))

    async def _generate(self, choice: Choice) -> None:
        bursts = self._backend.generate(self.call, choice.index)
        async with aclosing(bursts) as stream:
            async for burst in stream:
                await self._lifecycle.flowing()
                if burst.version is None:
                    burst = replace(burst, version=self._lifecycle.version)
                await self._queue.put(choice.feed(burst))
                if choice.finish is not None:
                    return
