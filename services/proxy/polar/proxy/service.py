"""The proxy as a process: its sockets, what it follows, and how it starts and stops.

- It listens at once and takes calls once `polar.control` was read back over the longest token life: a session that was
  closed while no replica ran must not be let in.
- It follows `polar.control` ever after; when the broker is away it goes on with what it knows, since a call needs the
  broker anyway.
- `drain`: no new calls, the running ones may end. Stopping: what runs is broken off as if its clients had left, and
  every end is written, as far as the time allows.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from polar.bus import Bus, BusError, Reader
from polar.schemas import SessionControl
from polar.service.clock import Clock, SystemClock
from polar.service.logs import get_logger
from polar.service.randomness import Randomness, SystemRandomness, new_id

from .app import Routes
from .capture import Recorder, Sender
from .dialects.responses import Responses
from .generate import Generations
from .generation import Deps
from .history import Histories
from .metrics import Metrics
from .resends import Resends
from .sessions import Sessions
from .settings import ProxySettings
from .slots import Slots
from .token_in.continuing import Continuing
from .upstreams.engines import Engines
from .upstreams.keeper import Keeper
from .upstreams.metrics import EngineMetrics
from .upstreams.pausing import Pauses
from .upstreams.policy import PolicyFollower
from .upstreams.trainers import Trainers, key_of_installation

CONTROL = "control"
STOPPING = "The proxy is stopping; another replica takes calls."
log = get_logger(__name__)


class ProxyService:
    """One replica; it keeps no state that another needs.

    `bus` is started by whoever made it. `secret` verifies session tokens. `sender`: what captures are sent through,
    the bus itself by default. Once `listening` is set, `port` is the one that was bound; `ready` means calls are taken.
    """

    def __init__(
        self,
        settings: ProxySettings,
        bus: Bus,
        secret: str,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        registry: CollectorRegistry | None = None,
        sender: Sender | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.settings = settings
        self.port = settings.port
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        self.sessions = Sessions(
            secret, clock, limit=settings.max_sessions, memory_ms=round(settings.control_memory * 1000)
        )
        self.recorder = Recorder(
            sender or bus,
            clock,
            start_timeout=settings.start_timeout,
            capture_timeout=settings.capture_timeout,
            retry_for=settings.capture_retry_for,
        )
        self.registry = registry or CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.engine_metrics = EngineMetrics(self.registry)
        self.engines: Engines | None = None
        """While it runs."""
        self.histories = Histories(
            clock,
            self.metrics,
            attempt_bytes=settings.history_session_bytes,
            attempts=settings.history_sessions,
            total_bytes=settings.history_bytes,
            deltas=settings.delta_prompts,
        )
        """What prompts are written against, and what calls go on from."""
        self.continuing = Continuing(settings, self.histories, self.metrics)
        self.responses = Responses(attempt_bytes=settings.response_session_bytes, total_bytes=settings.response_bytes)
        """What was told over OpenAI's Responses API and may be asked for again."""
        self.resends = Resends(settings, clock, self.metrics)
        """Calls whose clients may come back for the reply."""
        self.slots = Slots(settings.max_concurrent, self.metrics, settings.retry_after)
        self._bus = bus
        operator = settings.operator_key
        self._operator_key = key_of_installation(secret) if operator is None else operator.get_secret_value()
        self._clock = clock
        self._randomness = randomness or SystemRandomness()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the port cannot be bound.
            BusError: `polar.control` cannot be read, and trying again does not help.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            # no limit: the slots are it. Idle connections are dropped before vLLM does so, after 5 s: a POST that meets
            # its closing would fail for nothing
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            key = settings.engine_api_key
            headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
            )
            engines = self.engines = Engines(settings, http, self._clock, self.engine_metrics)
            stack.push_async_callback(engines.close)
            stack.push_async_callback(self._close_brackets)
            stack.push_async_callback(self.resends.stop)
            await stack.enter_async_context(self._site(engines))
            keeping = [
                asyncio.create_task(Keeper(engines, settings, self._clock).run()),
                asyncio.create_task(PolicyFollower(self._bus, engines, self._clock).run()),
            ]
            for task in keeping:
                task.add_done_callback(_ended)
            try:
                await self._follow()
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)

    async def drain(self) -> None:
        """Take no more calls and wait for those that run, and for their ends, at most `drain_timeout`."""
        self.slots.closed = STOPPING
        self.ready.clear()
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                await self.slots.all_free()
        except TimeoutError:
            log.warning("calls still run", running=self.slots.taken)

    async def _close_brackets(self) -> None:
        """Wait for the ends of the calls that were broken off; give up what is not written within `drain_timeout`.

        By the slots: a handler that is just being cancelled has not begun to write its end.
        """
        until = self._clock.monotonic() + self.settings.drain_timeout
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                await self.slots.all_free()
        except TimeoutError:
            log.warning("calls without an end", running=self.slots.taken)
        await self.recorder.close(max(until - self._clock.monotonic(), 0.0))

    def _site(self, engines: Engines) -> _Site:
        deps = Deps(
            settings=self.settings,
            sessions=self.sessions,
            recorder=self.recorder,
            engines=engines,
            histories=self.histories,
            continuing=self.continuing,
            resends=self.resends,
            metrics=self.metrics,
            clock=self._clock,
            randomness=self._randomness,
            max_record_bytes=self._bus.settings.max_record_bytes,
        )
        routes = Routes(
            self.sessions,
            Generations(deps, self.slots),
            self.metrics,
            self.responses,
            ready=self.ready.is_set,
            new_id=lambda: new_id(self._clock, self._randomness),
            more=Trainers(engines, Pauses(self._clock), self._operator_key).routes(),
        )
        return _Site(self, routes.application(self.settings.max_body_bytes))

    async def _follow(self) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            sleep=self._clock.sleep,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                await self._follow_once()

    async def _follow_once(self) -> None:
        since = self._clock.now_ms() - round(self.settings.control_memory * 1000)
        reader = await self._bus.reader([CONTROL], start=since)
        try:
            if not self.ready.is_set():
                ends = await reader.ends()  # as they are now: a busy scheduler must not put the start off for ever
                while not reader.reached(ends):
                    await self._apply(reader)
                if self.slots.closed != STOPPING:
                    self.slots.closed = ""
                    self.ready.set()
                    log.info("ready", port=self.port, sessions=len(self.sessions))
            while True:
                await self._apply(reader)
        finally:
            await reader.close()

    async def _apply(self, reader: Reader) -> None:
        for record in await reader.poll():
            if record.error is not None:
                log.error("unreadable control record", partition=record.partition, offset=record.offset)
            elif record.key is not None and (record.value is None or isinstance(record.value, SessionControl)):
                self.sessions.apply(record.key, record.value)
                if record.value is None:
                    continue
                self.histories.close(record.key, record.value.attempt)
                self.responses.close(record.key, record.value.attempt)
                self.resends.close(record.key, record.value.attempt)


def _ended(task: asyncio.Task[None]) -> None:
    """Tells of a task that was to run as long as the service does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a part of the proxy ended", error=f"{type(error).__name__}: {error}")


class _Site:
    """The listening socket as a context manager."""

    def __init__(self, service: ProxyService, app: web.Application) -> None:
        self._service = service
        # a client that leaves cancels its handler: that is how its generation ends
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)

    async def __aenter__(self) -> None:
        service = self._service
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, service.settings.host, service.settings.port).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        service.port = self._runner.addresses[0][1]
        service.listening.set()

    async def __aexit__(self, *_: object) -> None:
        self._service.ready.clear()
        self._service.slots.closed = STOPPING
        await self._runner.cleanup()
