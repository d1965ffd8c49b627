"""A running gateway node: what comes from the scheduler goes onto the books and into the pools.

Handling an assignment only writes and wakes; the work is the pools'. All of it may come again after a restart: what is
known is left as it is. Of two halves only INIT reads assignments; RUN sees on the books, at each heartbeat, which of
its attempts are revoked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from polar.bus import Bus, BusError
from polar.runtime import RuntimeFailure
from polar.schemas import (
    Event,
    Held,
    SessionAssigned,
    SessionReady,
    SessionReleased,
    SessionRevoked,
    Stage,
)
from polar.service.clock import Clock
from polar.service.logs import bound, get_logger

from . import machine
from .boxes import Boxes
from .machine import Row, Step
from .metrics import Metrics
from .pool import Pool, Why
from .settings import GatewaySettings
from .state import Books
from .work import Workers

log = get_logger(__name__)

TEARDOWN_SLOTS = 4


class Node:
    """The pools of this process over the shared books. `run` them all; see the module."""

    def __init__(
        self,
        settings: GatewaySettings,
        books: Books,
        boxes: Boxes,
        workers: Workers,
        bus: Bus,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._books = books
        self._boxes = boxes
        self._workers = workers
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._half = settings.stage
        self._draining = False
        self.init = Pool("init", settings.init_slots, workers.init, workers.crashed, self._room)
        self.running = Pool("run", settings.run_slots, workers.run, workers.crashed)
        self.teardown = Pool("teardown", TEARDOWN_SLOTS, workers.teardown, self._teardown_failed)

    # start

    async def recover(self) -> None:
        """Go on where the process before ended: what ran in it is dead and reported as lost, what waits goes on."""
        lost = 0
        for row in await self._books.rows():
            step = await self._books.step(
                row.assignment_id, lambda one: machine.recovered(one, self._half, self._now())
            )
            if step is not None:
                lost += 1
                row = step.row
            if row.ended:
                self.teardown.add(row.assignment_id)
            elif row.stage is Stage.REGISTERED and self._half.prepares:
                self.init.add(row.assignment_id)
        await self._books.adopt()
        log.info("books read", boot=self._books.boot_id, lost=lost, **await self._counts())

    async def kill_leftovers(self) -> None:
        """Make sure that nothing runs in the boxes whose worker died, before anything is reported about them."""
        mine = [*([Stage.INITIALIZING] if self._half.prepares else []), *([Stage.RUNNING] if self._half.runs else [])]
        for row in await self._books.rows(*mine):
            try:
                box = await self._boxes.find(row)
                if box is not None:
                    await box.kill_all()
            except RuntimeFailure as error:
                log.warning("a box of the process before could not be searched", box=row.box_id, error=str(error))

    # what comes

    async def on_assignment(self, event: Event, offset: int) -> None:
        """One record of `assignments` for this node."""
        if getattr(event, "boot", self._books.boot_id) != self._books.boot_id:
            self._metrics.ignored.inc()
            log.info("assignment of another boot ignored", type=type(event).__name__, offset=offset)
        elif isinstance(event, SessionAssigned):
            await self._assigned(event)
        elif isinstance(event, SessionRevoked):
            await self._stop(event, lambda row: machine.revoke(row, event.reason, self._now()))
        elif isinstance(event, SessionReleased):
            await self._stop(event, lambda row: machine.release(row, self._now()))

    async def _assigned(self, event: SessionAssigned) -> None:
        row = machine.assigned(event, self._settings.default_backend, self._now())
        if not await self._books.assign(row, event):
            return
        with bound(session=event.session_id, task=event.task_id, attempt=event.attempt):
            if self._draining:
                await self._books.step(row.assignment_id, lambda one: machine.given_back(one, self._now()))
                return
            log.info("assigned", assignment=event.assignment_id)
        self.init.add(row.assignment_id)

    async def _stop(
        self,
        event: SessionRevoked | SessionReleased,
        decide: Callable[[Row], Step | None],
    ) -> None:
        row = await self._books.of_session(event.session_id, event.attempt)
        if row is None:
            return
        step = await self._books.step(row.assignment_id, decide)
        if step is not None:
            row = step.row
        if row.ended:
            self.teardown.add(row.assignment_id)
        else:
            self._heed(row)

    def _heed(self, row: Row) -> None:
        """Tell the worker of a revoked attempt, if it is one of this process."""
        if row.revoked is not None and not row.ended:
            for pool in (self.init, self.running):
                pool.stop(row.assignment_id, Why.REVOKED, row.revoked)

    async def follow_ready(self) -> None:
        """Give RUN what is READY: at first by the books, then as it is told on `ready`. Until cancelled."""
        await self._lasting(self._follow_ready, "reading `ready`")

    async def _follow_ready(self) -> None:
        node = self._settings.node_id
        here = self._bus.partition_of("ready", node)
        reader = await self._bus.reader(["ready"], start="latest", partitions={"ready": [here]})
        try:
            # a box is READY on the books before it is told, so none can fall between the books and the reader
            for row in await self._books.rows(Stage.READY):
                self.running.add(row.assignment_id)
            while True:
                for record in await reader.poll(timeout_s=1.0):
                    value = record.value
                    if record.key == node and isinstance(value, SessionReady) and value.boot == self._books.boot_id:
                        self.running.add(value.assignment_id)
        finally:
            await reader.close()

    async def _lasting(self, work: Callable[[], Awaitable[None]], doing: str) -> None:
        """`work`, again and again while the broker is away."""

        def told(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            log.warning(f"{doing}: trying again", error=str(error))

        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_random_exponential(multiplier=0.2, max=self._settings.report_backoff_max_s),
            before_sleep=told,
            reraise=True,
        ):
            with attempt:
                await work()

    # what goes on

    async def held(self) -> list[Held]:
        """Every attempt on the books, of both halves.

        Asked with each heartbeat, which makes it the moment to see what the other half has written: revokes, room for
        further boxes, and which boxes are gone.
        """
        rows = await self._books.rows()
        for row in rows:
            self._heed(row)
        self._boxes.keep({row.box_id for row in rows})
        for stage in Stage:
            self._metrics.attempts.labels(stage=stage).set(sum(row.stage is stage for row in rows))
        self.init.wake()
        return [row.held for row in rows]

    async def _room(self, preparing: int) -> bool:
        """Whether another box fits before RUN: READY has a bound of its own beyond the free RUN slots."""
        counts = await self._books.count()
        free = max(0, self._settings.run_slots - counts.get(Stage.RUNNING, 0))
        return counts.get(Stage.READY, 0) + preparing < self._settings.ready_slots + free

    async def reap(self) -> None:
        """Every so often: tidy what could not be tidied, and destroy boxes that nobody owns. Until cancelled."""
        while True:
            for row in await self._books.rows(Stage.ENDED):
                self.teardown.add(row.assignment_id)
            try:
                for box_id in await self._boxes.reap(self._owned):
                    self._metrics.reaped.inc()
                    log.warning("reaped a box that nobody owned", box=box_id)
            except RuntimeFailure as error:
                log.warning("looking for boxes that nobody owns failed", error=str(error))
            await self._clock.sleep(self._settings.reap_interval_s)

    async def _owned(self) -> set[str]:
        return {row.box_id for row in await self._books.rows()}

    async def _teardown_failed(self, assignment_id: str, error: Exception) -> None:
        log.error("teardown failed; the reaper tries again", assignment=assignment_id, error=str(error))

    # the end

    async def drain(self) -> None:
        """Take nothing new, give back what has not begun, let run what runs, and stop it when the grace is over.

        READY boxes stay for the next start.
        """
        self._draining = True
        self.init.pause()
        self.running.pause()
        if self._half.prepares:
            for row in await self._books.rows(Stage.REGISTERED):
                await self._books.step(row.assignment_id, lambda one: machine.given_back(one, self._now()))
        try:
            async with asyncio.timeout(self._settings.drain_grace_s):
                await self.init.idle()
                await self.running.idle()
        except TimeoutError:
            for pool in (self.init, self.running):
                pool.stop_all(Why.DRAIN, "the gateway is shutting down")
            await self.init.idle()
            await self.running.idle()

    async def _counts(self) -> dict[str, int]:
        return {stage.lower(): count for stage, count in (await self._books.count()).items()}

    def _now(self) -> int:
        return self._clock.now_ms()
