"""A grader node: takes grades from the scheduler, does them a few at a time, reports.

Promises: what is assigned is on the books before it counts as read; EVALUATING is acknowledged before the evaluator
touches anything; then exactly one GRADED follows, with a grade or a failure, unless the grade is revoked or the process
dies (the boot id is new with each process, so the scheduler then knows the grade as lost). It decides nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from prometheus_client import CollectorRegistry
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential

from polar.bus import Bus, BusError, Out
from polar.schemas import (
    Capacity,
    Failure,
    Grade,
    GradeAssigned,
    GradePrewarm,
    GradeRevoked,
    Held,
    Offers,
    Stage,
    StageChanged,
)
from polar.schemas.base import Event
from polar.service.logs import bound, get_logger
from polar.service.node import NodeLink
from polar.service.randomness import Randomness, SystemRandomness, new_id

from .grading import Grader
from .metrics import GraderMetrics
from .registry import BUILT_IN
from .settings import EvaluatorSettings

_log = get_logger(__name__)

HELD_STAGE = "GRADE"


@dataclass(slots=True)
class _Job:
    assignment: GradeAssigned
    task: asyncio.Task[None]


class GraderService:
    """One grader process."""

    def __init__(
        self,
        bus: Bus,
        settings: EvaluatorSettings,
        *,
        randomness: Randomness | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`bus`: opened, of service `grader`."""
        self._bus = bus
        self._settings = settings
        self._boot_id = new_id(bus.clock, randomness or SystemRandomness())
        self._metrics = GraderMetrics(registry or CollectorRegistry())
        self._slots = asyncio.Semaphore(settings.slots)
        self._books: dict[str, _Job] = {}
        """By grade id: waiting, under way, or not yet reported."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._broken: asyncio.Future[None] | None = None
        self.link = NodeLink(
            bus,
            node_id=settings.node_id,
            boot_id=self._boot_id,
            capacity=Capacity(grade=settings.slots),
            held=self._held,
            on_assignment=self._on_assignment,
            offers=Offers(evaluators=[*BUILT_IN, *sorted(settings.allow)]),
            heartbeat_s=settings.heartbeat_s,
        )

    @property
    def ready(self) -> bool:
        """Whether the scheduler knows it."""
        return self.link.beating.is_set()

    async def run(self) -> None:
        """Grades until cancelled; grades under way are then stopped, and are the scheduler's to assign anew."""
        await self._bus.prepare()
        self._broken = asyncio.get_running_loop().create_future()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            self._grader = Grader(
                self._bus,
                http,
                allowed=self._settings.allow,
                max_timeout_s=self._settings.max_timeout_s,
                gateway_patience_s=self._settings.gateway_patience_s,
            )
            link = asyncio.create_task(self.link.run(), name="node link")
            try:
                done, _ = await asyncio.wait([link, self._broken], return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            finally:
                link.cancel()
                jobs = [job.task for job in self._books.values()]
                for task in jobs:
                    task.cancel()
                await asyncio.wait([link, *jobs])

    async def drain(self) -> None:
        """Takes no new grades; returns when those it has are reported."""
        self.link.draining = True
        self.link.beat_now()
        await self._idle.wait()

    async def _held(self) -> list[Held]:
        return [
            Held(
                assignment_id=grade_id,
                session_id=job.assignment.session_id,
                attempt=job.assignment.attempt,
                stage=HELD_STAGE,
            )
            for grade_id, job in self._books.items()
        ]

    async def _on_assignment(self, event: Event, offset: int) -> None:
        match event:
            case GradeAssigned() if event.boot == self._boot_id and event.grade_id not in self._books:
                task = asyncio.create_task(self._grade(event), name=f"grade {event.grade_id}")
                self._books[event.grade_id] = _Job(event, task)
                self._idle.clear()
                task.add_done_callback(lambda task: self._done(event.grade_id, task))
            case GradeRevoked() if event.boot == self._boot_id and event.grade_id in self._books:
                _log.info("grade revoked", session=event.session_id, reason=event.reason)
                self._metrics.grades.labels("revoked").inc()
                self._books[event.grade_id].task.cancel()
            case GradePrewarm():
                _log.debug("no box is started ahead in this version", session=event.session_id)
            case _:
                _log.debug("not for this process", kind=type(event).__name__, offset=offset)

    def _done(self, grade_id: str, task: asyncio.Task[None]) -> None:
        del self._books[grade_id]
        if not self._books:
            self._idle.set()
        if not task.cancelled() and task.exception() is not None and self._broken and not self._broken.done():
            error = task.exception()
            assert error is not None
            self._broken.set_exception(error)

    async def _grade(self, assignment: GradeAssigned) -> None:
        clock = self._bus.clock
        with bound(session=assignment.session_id, attempt=assignment.attempt, task=assignment.task_id):
            async with self._slots:
                started = clock.monotonic()
                await self._report(assignment, Stage.EVALUATING)
                found = await self._grader.grade(assignment)
                seconds = clock.monotonic() - started
                await self._report(assignment, Stage.GRADED, found, seconds)
            if isinstance(found, Failure):
                _log.warning("no grade", reason=found.message)
            self._metrics.graded(assignment.evaluator.strategy, found, seconds)

    async def _report(
        self,
        assignment: GradeAssigned,
        stage: Stage,
        found: Grade | Failure | None = None,
        seconds: float | None = None,
    ) -> None:
        """Acknowledged when it returns; waits for a broker that is away, since the report is all that is left."""
        report = StageChanged(
            session_id=assignment.session_id,
            task_id=assignment.task_id,
            attempt=assignment.attempt,
            stage=stage,
            at_ms=self._bus.clock.now_ms(),
            node=self._settings.node_id,
            boot=self._boot_id,
            assignment=assignment.grade_id,
            grade=found if isinstance(found, Grade) else None,
            failure=found if isinstance(found, Failure) else None,
            timing_ms={} if seconds is None else {"grade_ms": round(seconds * 1000, 3)},
        )
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_exponential(multiplier=0.2, max=10),
            sleep=self._bus.clock.sleep,
            reraise=True,
        ):
            with attempt:
                await self._bus.send(Out("stages", assignment.session_id, report))
