"""One process of submit: the HTTP API, the view, and, unless it is told otherwise, the scheduler and the callbacks.

Several may run. Each answers from its own view; one scheduler of all leads, the others stand by, and callbacks are
sent where it leads. `run` ends only when it is cancelled or a part fails; a part that fails takes the others with it,
so that a process is whole or gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings
from polar.schemas.topics import Service
from polar.service.clock import Clock, SystemClock
from polar.service.randomness import Randomness, SystemRandomness, new_id
from polar.service.settings import CommonSettings
from polar.service.tokens import BoxKey, sign_box

from .api import Api
from .callbacks import Callbacks
from .entries import Change, Moved
from .events import EventHub
from .feed import ViewFeed, identity_of
from .metrics import SubmitMetrics
from .scheduler import SchedulerService
from .scheduler.settings import SchedulerSettings
from .sent import SentFile
from .settings import SubmitSettings
from .view import View
from .waiting import Waiters

log = structlog.get_logger("polar.submit")


class ListenFailed(RuntimeError):
    """The HTTP API cannot listen where the settings say."""


class SubmitService:
    """A service for `polar.service.run`: `await run()` until cancelled."""

    def __init__(
        self,
        common: CommonSettings,
        kafka: BusSettings,
        settings: SubmitSettings,
        scheduler: SchedulerSettings,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry`: where metrics go; None: one of its own, shown at `/metrics`."""
        self._common = common
        self._kafka = kafka
        self._settings = settings
        self._scheduler = scheduler
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._registry = registry or CollectorRegistry()
        self.port: int | None = None
        """What the API listens on, once it does."""
        self.listening = asyncio.Event()

    async def run(self) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(Bus(self._kafka, Service.SUBMIT, clock=self._clock))
            await bus.prepare()
            path = settings.view_file or self._common.state_dir.absolute() / "submit" / "view.sqlite"
            view = await stack.enter_async_context(
                await View.open(path, settings.view_limits(), identity=identity_of(bus.settings))
            )
            metrics = SubmitMetrics(self._registry)
            metrics.watch(view)
            hub = EventHub(
                bus.partitions("stages"),
                kept=settings.events_kept,
                queue=settings.event_queue,
                watchers=settings.event_watchers,
            )
            waiters = Waiters(view, settings.max_waiting)
            scheduler = await self._open_scheduler(stack) if settings.scheduler else None
            callbacks: Callbacks | None = None
            if scheduler is not None:
                sent = SentFile(self._common.state_dir / "submit-callbacks", limit=settings.max_tasks)
                callbacks = Callbacks(bus, view, settings, metrics, sent, scheduler.leading)

            def tell(change: Change) -> None:
                if isinstance(change, Moved):
                    hub.publish(change)
                    return
                waiters.tell(change)
                if callbacks is not None:
                    callbacks.tell(change)

            feed = ViewFeed(
                bus, view, metrics, [tell], batch_records=settings.batch_records, events_kept=settings.events_kept
            )
            api = Api(bus, view, waiters, hub, settings, metrics, self._randomness)
            await stack.enter_async_context(self._listening(api.app(), hub))
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(feed.run(), name="view")
            if scheduler is not None and callbacks is not None:
                group.create_task(scheduler.run(), name="scheduler")
                group.create_task(callbacks.run(), name="callbacks")

    async def _open_scheduler(self, stack: AsyncExitStack) -> SchedulerService:
        secret = await asyncio.to_thread(self._common.secret)

        def sign(session_id: str, attempt: int, not_after_ms: int) -> str:
            return sign_box(BoxKey(session_id=session_id, attempt=attempt, not_after_ms=not_after_ms), secret)

        # a bus of its own: each writes only what the topic table lets it write
        bus = await stack.enter_async_context(Bus(self._kafka, Service.SCHEDULER, clock=self._clock))
        return SchedulerService(
            bus,
            self._scheduler,
            self._settings.limits(),
            sign,
            leader_id=new_id(self._clock, self._randomness),
            inline_instruction_bytes=self._settings.inline_instruction_bytes,
            registry=self._registry,
        )

    @asynccontextmanager
    async def _listening(self, app: web.Application, hub: EventHub) -> AsyncIterator[None]:
        settings = self._settings
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=settings.shutdown_s)
        await runner.setup()
        try:
            site = web.TCPSite(runner, settings.host, settings.port)
            try:
                await site.start()
            except OSError as error:
                raise ListenFailed(
                    f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
                    "set POLAR_SUBMIT_HOST and POLAR_SUBMIT_PORT"
                ) from None
            self.port = int(runner.addresses[0][1])
            self.listening.set()
            log.info("the API listens", host=settings.host, port=self.port)
            yield
        finally:
            # watchers first: a stream never ends by itself, and cleanup waits for open requests
            hub.close()
            await runner.cleanup()
            self.listening.clear()
