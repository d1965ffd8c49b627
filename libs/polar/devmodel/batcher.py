"""Continuous batching: one thread runs the model for all calls.

Each turn of the thread reads one chunk of one waiting prompt and makes one decode step for every running sequence, so
a new call joins at the next token and a long prompt holds nobody up for more than a chunk. Bounded: a call starts
only when its whole cache fits into what is left of `kv_tokens` and of `max_rows`; the others wait in the order they
came. What a sequence computes does not depend on what runs beside it.

Calls come from an event loop and are answered there; the thread touches the loop only through `call_soon_threadsafe`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np

from .choice import Sampled
from .errors import EngineError
from .llama import PREFILL, ROWS, Cache, Llama
from .sampler import Sampler


class Stopped(EngineError):
    """The model's thread ended while a call was running."""


@dataclass(slots=True, eq=False)
class Job:
    """One sequence. `stops` end it when sampled (after `min_tokens`); the tokens come out of `tokens()`."""

    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    sampler: Sampler
    told: asyncio.Queue[Sampled | Exception | None] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    """Set by the loop, read by the thread: no lock is needed for one flag."""
    cache: Cache | None = None
    sampled: int = 0
    last: int = 0

    @property
    def size(self) -> int:
        """Cache positions that the whole sequence may need."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def reading(self) -> bool:
        return self.sampled == 0

    async def tokens(self) -> AsyncGenerator[Sampled, None]:
        """Each token as it is sampled; ends where the sequence does."""
        while (item := await self.told.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Batcher:
    """The thread and its queue. `start` and `close` from the event loop that submits."""

    def __init__(self, load: Callable[[], Llama], *, kv_tokens: int, max_rows: int) -> None:
        """`load` runs in the thread. `kv_tokens`: cache positions of all sequences together."""
        self._load = load
        self._kv_tokens = kv_tokens
        self._max_rows = max_rows
        self._arrived = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> Llama:
        """Load the model and run; returns it for what it says of itself. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Llama] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loaded,), name="devmodel", daemon=True)
        self._thread.start()
        return await loaded

    async def close(self) -> None:
        """End the thread; running sequences end with `Stopped`."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    @property
    def waiting(self) -> int:
        """Sequences that have not started yet."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a sequence. Raises `Stopped` when the thread has ended."""
        with self._arrived:
            if self._stopping:
                raise Stopped("the model has stopped; start the server again")
            self._waiting.append(job)
            self._arrived.notify()

    def cancel(self, job: Job) -> None:
        """Give a sequence up: its rows and cache are free at the next step."""
        with self._arrived:
            job.cancelled = True
            self._arrived.notify()

    # the thread ------------------------------------------------------------------------------------------------------

    def _main(self, loaded: "asyncio.Future[Llama]") -> None:
        try:
            model = self._load()
        except Exception as error:  # noqa: BLE001 - told to whoever awaits the start
            failure = error
            self._tell(lambda: None if loaded.cancelled() else loaded.set_exception(failure))
            return
        self._tell(lambda: None if loaded.cancelled() else loaded.set_result(model))
        failed: Exception = Stopped("the model was stopped")
        try:
            while self._admit():
                self._turn(model)
        except Exception as error:  # noqa: BLE001 - a broken model must end its calls, not hang them
            failed = error
        with self._arrived:
            self._stopping = True
            left = [*self._running, *self._waiting]
        self._tell(lambda: _fail(left, failed))

    def _tell(self, say: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(say)

    def _admit(self) -> bool:
        """Wait for work and take in what fits; False when it is time to end."""
        with self._arrived:
            while True:
                self._running = [job for job in self._running if not job.cancelled]
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
                left = self._kv_tokens - sum(job.size for job in self._running)
                # strictly in order: a large call is not overtaken for ever by small ones
                while self._waiting and len(self._running) < self._max_rows and self._waiting[0].size <= left:
                    job = self._waiting.popleft()
                    left -= job.size
                    self._running.append(job)
                if self._stopping:
                    return False
                if self._running:
                    return True
                self._arrived.wait()

    def _turn(self, model: Llama) -> None:
        told: list[tuple[Job, Sampled]] = []
        decoding = [job for job in self._running if not job.reading]
        if reading := next((job for job in self._running if job.reading), None):
            told += self._read(model, reading)
        for at in range(0, len(decoding), ROWS):
            rows = decoding[at : at + ROWS]
            caches = [job.cache for job in rows if job.cache is not None]
            logits = model.step([job.last for job in rows], caches)
            told += [(job, job.sampler.draw(row)) for job, row in zip(rows, logits, strict=True)]
        ended = {job for job, token in told if self._advance(job, token)}
        self._running = [job for job in self._running if job not in ended]
        for job in ended:
            job.cache = None
        self._tell(lambda: _deliver(told, ended))

    def _read(self, model: Llama, job: Job) -> list[tuple[Job, Sampled]]:
        """One chunk of a prompt, and the first token when it was the last chunk."""
        if job.cache is None:
            job.cache = model.cache(job.size)
        start = job.cache.length
        hidden = model.read(job.prompt_ids[start : start + PREFILL], job.cache)
        if job.cache.length < len(job.prompt_ids):
            return []
        return [(job, job.sampler.draw(model.logits(hidden[np.newaxis])[0]))]

    def _advance(self, job: Job, token: Sampled) -> bool:
        """Take a token into a sequence; True when that ends it."""
        job.sampled += 1
        job.last = token.id
        stopped = token.id in job.stops and job.sampled >= job.min_tokens
        return stopped or job.sampled >= job.max_tokens


def _fail(jobs: list[Job], failure: Exception) -> None:
    for job in jobs:
        job.told.put_nowait(failure)


def _deliver(told: list[tuple[Job, Sampled]], ended: set[Job]) -> None:
    for job, token in told:
        job.told.put_nowait(token)
    for job in ended:
        job.told.put_nowait(None)
