"""A submit without its scheduler, on a real broker, and a tiny stand-in that answers as the scheduler would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings, Out, Reader, Record
from polar.schemas import (
    CancelRequest,
    Event,
    Outcome,
    Problem,
    RecordRef,
    Stage,
    TaskAccepted,
    TaskRejected,
    TaskRequest,
    Trajectory,
    sha256,
)
from polar.schemas.ids import session_id
from polar.schemas.topics import Service
from polar.schemas.validation import Limits, Refused, check, parse
from polar.service.randomness import SeededRandomness
from polar.submit.api import Api
from polar.submit.entries import Change, Moved, TaskEntry
from polar.submit.events import EventHub
from polar.submit.feed import ViewFeed, identity_of
from polar.submit.metrics import SubmitMetrics
from polar.submit.settings import SubmitSettings
from polar.submit.view import View
from polar.submit.waiting import Waiters
from tests.submit.records import COMPLETED, moved, session_result, task_result


class StandIn:
    """Answers tasks as the scheduler does, and ends sessions when a test says so. Holds everything in memory."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.mute = False
        """Read tasks, answer nothing."""
        self.busy = False
        """Take no further session."""
        self.records: list[Record] = []
        self.cancels: list[CancelRequest] = []
        self.changed = asyncio.Condition()
        self._accepted: dict[str, tuple[str, TaskAccepted]] = {}

    async def run(self) -> None:
        reader: Reader = await self.bus.reader(["tasks"])
        while True:
            for record in await reader.poll(timeout_s=0.1):
                await self._take(record)
                async with self.changed:
                    self.records.append(record)
                    self.changed.notify_all()

    async def seen(self, count: int) -> list[Record]:
        """The records of `tasks`, once there are `count`."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: len(self.records) >= count)
        return self.records

    async def _take(self, record: Record) -> None:
        try:
            request = record.value or parse(record.raw or b"")
            if isinstance(request, CancelRequest):
                self.cancels.append(request)
                return
            assert isinstance(request, TaskRequest)
            notices = check(request, Limits()).notices
        except Refused as refused:
            await self._reject(refused.task_id, record.ref, refused.problems)
            return
        if self.mute:
            return
        task_id, digest = request.task_id, sha256(request)
        assert task_id is not None
        known = self._accepted.get(task_id)
        if known is None and self.busy:
            full = Problem(field="num_samples", message="8 sessions are open, and 8 may be", code="busy")
            await self._reject(task_id, record.ref, [full])
            return
        if known is not None and known[0] != digest:
            await self._reject(
                task_id, record.ref, [Problem(field="task_id", message="has another body", code="conflict")]
            )
            return
        if known is not None:
            answer = replace(known[1], answers=record.ref)
        else:
            names = [session_id(record.partition, record.offset, number) for number in range(request.num_samples)]
            answer = TaskAccepted(
                task_id=task_id,
                count=request.num_samples,
                group_id=task_id,
                source=record.ref,
                answers=record.ref,
                at_ms=self.bus.clock.now_ms(),
                sessions=names,
                warnings=notices,
                harness=request.agent.harness,
            )
        self._accepted[task_id] = (digest, answer)
        await self.write("stages", task_id, answer)

    async def _reject(self, task_id: str | None, ref: RecordRef, problems: list[Problem]) -> None:
        rejected = TaskRejected(task_id=task_id, answers=ref, problems=problems, at_ms=self.bus.clock.now_ms())
        await self.write("stages", task_id or "none", rejected)

    async def write(self, topic: str, key: str, *events: Event | None) -> list[RecordRef]:
        return await self.bus.send(*[Out(topic, key, one) for one in events])

    async def stage(self, task_id: str, stage: Stage, number: int = 0, **more: Any) -> str:
        """Report a stage of one of the task's sessions; its id."""
        session = self._accepted[task_id][1].sessions[number]
        await self.write("stages", session, moved(session, stage, task_id=task_id, **more))
        return session

    async def finish(
        self,
        task_id: str,
        outcome: Outcome = COMPLETED,
        trajectory: Callable[[str], Trajectory] | None = None,
        **more: Any,
    ) -> None:
        """End all sessions of a task, and the task."""
        sessions = self._accepted[task_id][1].sessions
        for number, session in enumerate(sessions):
            ref = None
            if trajectory is not None:
                (ref,) = await self.write("trajectories", task_id, trajectory(session))
            result = replace(
                session_result(f"{task_id}-{number}", outcome, **more),
                session_id=session,
                task_id=task_id,
                trajectory=ref,
            )
            await self.write("results", f"s/{session}", result)
        ended = task_result(task_id, len(sessions), at_ms=self.bus.clock.now_ms())
        await self.write("results", f"t/{task_id}", ended)


@dataclass
class Submit:
    """The parts of a running submit, for tests to look into."""

    bus: Bus
    settings: SubmitSettings
    view: View
    hub: EventHub
    waiters: Waiters
    metrics: SubmitMetrics
    feed: ViewFeed
    client: TestClient[Any, Any]
    scheduler: StandIn
    listeners: list[Callable[[Change], None]] = field(default_factory=list)

    async def task(self, task_id: str, **query: str) -> Any:
        response = await self.client.get(f"/rollout/task/{task_id}", params=query)
        assert response.status == 200, await response.text()
        return await response.json()

    async def submit(self, **change: Any) -> Any:
        """Submit a small task; the answer."""
        response = await self.client.post("/rollout/task/submit", json=task_body(**change))
        assert response.status == 200, await response.text()
        return await response.json()

    async def known(self, task_id: str) -> TaskEntry | None:
        return await self.view.task(task_id)

    async def settled(self, *task_ids: str) -> None:
        """Wait until the view shows these as ended."""

        async def all_ended() -> bool:
            return all([await self.view.settled(one) for one in task_ids])

        await self.until(all_ended)

    async def until(self, true: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
        """Wait until the view shows it; looks again after every change."""
        changed = asyncio.Event()

        def note(_: Change) -> None:
            changed.set()

        self.listeners.append(note)
        try:
            async with asyncio.timeout(20):
                while True:
                    changed.clear()
                    found = true()
                    if found if isinstance(found, bool) else await found:
                        return
                    await changed.wait()
        finally:
            self.listeners.remove(note)


async def eventually(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for what announces itself nowhere."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


def task_body(**change: Any) -> dict[str, Any]:
    return {
        "instruction": "do it",
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
        **change,
    }


Start = Callable[..., Awaitable[Submit]]


@pytest.fixture
async def start(bus_settings: BusSettings, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a submit with settings of the test's choice; several share the log, the first one's stand-in and the
    folder of the views' files."""
    # the views are closed last, after those who write and read them have ended
    async with AsyncExitStack() as views, AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus(bus_settings, Service.SUBMIT))
        await bus.prepare()
        scheduler = StandIn(await stack.enter_async_context(Bus(bus_settings, Service.SCHEDULER)))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        running = [group.create_task(scheduler.run())]

        async def stop() -> None:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        stack.push_async_callback(stop)

        async def make(**settings: Any) -> Submit:
            chosen = SubmitSettings(**{"accept_timeout_s": 20.0, **settings})
            path = tmp_path / "submit" / "view.sqlite"
            view = await views.enter_async_context(
                await View.open(path, chosen.view_limits(), identity=identity_of(bus.settings))
            )
            metrics = SubmitMetrics(CollectorRegistry())
            metrics.watch(view)
            hub = EventHub(
                bus.partitions("stages"),
                kept=chosen.events_kept,
                queue=chosen.event_queue,
                watchers=chosen.event_watchers,
            )
            waiters = Waiters(view, chosen.max_waiting)
            listeners: list[Callable[[Change], None]] = []

            def tell(change: Change) -> None:
                if isinstance(change, Moved):
                    hub.publish(change)
                else:
                    waiters.tell(change)
                for listener in list(listeners):
                    listener(change)

            feed = ViewFeed(
                bus, view, metrics, [tell], batch_records=chosen.batch_records, events_kept=chosen.events_kept
            )
            app = Api(bus, view, waiters, hub, chosen, metrics, SeededRandomness(7)).app()
            client = await stack.enter_async_context(TestClient(TestServer(app)))
            stack.callback(hub.close)
            running.append(group.create_task(feed.run()))
            return Submit(bus, chosen, view, hub, waiters, metrics, feed, client, scheduler, listeners)

        yield make


@pytest.fixture
async def submit(start: Start) -> Submit:
    """A submit that has caught up."""
    made = await start()
    async with asyncio.timeout(30):
        await made.feed.ready.wait()
    return made
