"""Tasks in, trajectories out: what users, trainers and the command line import.

Everything goes over the log; no service is called. A trainer's loop is

    async with PolarClient(BusSettings()) as client:
        accepted = await client.submit(task)
        async for event in client.trajectories(task_ids={accepted.task_id}):
            if isinstance(event, GroupClosed): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from polar.bus import Bus, BusSettings, Out, Reader, Record
from polar.schemas import (
    CancelRequest,
    Claim,
    GroupClosed,
    NodeHeartbeat,
    Problem,
    SessionResult,
    StageChanged,
    TaskAccepted,
    TaskRejected,
    TaskRequest,
    TaskResult,
    Trajectory,
)
from polar.schemas.topics import Service
from polar.service.clock import Clock, SystemClock
from polar.service.randomness import Randomness, SystemRandomness, new_id

INLINE_BYTES = 64 * 1024
"""Instructions longer than this become claims."""


class TaskRefused(ValueError):
    """The scheduler did not take the task; `problems` says which field and why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{one.field or 'task'}: {one.message}" for one in problems))
        self.problems = problems


class NoAnswer(TimeoutError):
    """No scheduler answered in time. The task is in the log: submit it again with the same id to ask again."""

    def __init__(self, task_id: str, waited_s: float) -> None:
        super().__init__(
            f"no scheduler answered within {waited_s:g} s; is `polar serve submit` running? "
            f"The task is kept in the log under id {task_id}"
        )
        self.task_id = task_id


class PolarClient:
    """An async context manager around one connection to the log."""

    def __init__(
        self, settings: BusSettings, *, clock: Clock | None = None, randomness: Randomness | None = None
    ) -> None:
        self.clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self.bus = Bus(settings, Service.USER, clock=self.clock)

    async def __aenter__(self) -> Self:
        await self.bus.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.bus.__aexit__(kind, error, trace)

    def new_id(self) -> str:
        """A UUIDv7."""
        return new_id(self.clock, self._randomness)

    async def keep(self, data: bytes, content_type: str = "application/octet-stream") -> Claim:
        """Put bytes into the blob store, e.g. a file for `PrepareAction.blob`."""
        return await self.bus.blobs.put(data, content_type)

    async def submit(self, task: TaskRequest, *, timeout_s: float = 20.0) -> TaskAccepted:
        """Publish a task and wait for the log's answer. A task without an id gets one.

        Raises:
            TaskRefused: a field is wrong, or the id was used for another body.
            NoAnswer: nobody answered in time.
        """
        task_id = task.task_id or self.new_id()
        task = replace(task, task_id=task_id)
        if isinstance(task.instruction, str) and len(task.instruction.encode()) > INLINE_BYTES:
            claim = await self.keep(task.instruction.encode(), "text/plain; charset=utf-8")
            task = replace(task, instruction=claim)
        reader = await self.bus.reader(["stages"], start="latest")
        try:
            (ref,) = await self.bus.send(Out("tasks", task_id, task))
            deadline = self.clock.monotonic() + timeout_s
            while self.clock.monotonic() < deadline:
                for record in await reader.poll(timeout_s=0.2):
                    answer = record.value
                    if isinstance(answer, TaskAccepted) and answer.answers == ref:
                        return answer
                    if isinstance(answer, TaskRejected) and answer.answers == ref:
                        raise TaskRefused(answer.problems)
            raise NoAnswer(task_id, timeout_s)
        finally:
            await reader.close()

    async def cancel(self, task_id: str, session_id: str | None = None, reason: str = "cancelled by request") -> None:
        """Ask for a task's sessions, or one of them, to end; their trajectories still come."""
        await self.bus.send(Out("tasks", task_id, CancelRequest(task_id=task_id, session_id=session_id, reason=reason)))

    async def stages(self, task_id: str, *, since_ms: int | None = None) -> AsyncIterator[StageChanged | TaskResult]:
        """Each report on the task's sessions as it comes, from `since_ms` on; ends with the task's result."""
        reader = await self.bus.reader(["stages", "results"], start="earliest" if since_ms is None else since_ms)
        try:
            while True:
                for record in await reader.poll(timeout_s=0.5):
                    event = record.value
                    if isinstance(event, StageChanged) and event.task_id == task_id:
                        yield event
                    elif isinstance(event, TaskResult) and event.task_id == task_id:
                        yield event
                        return
        finally:
            await reader.close()

    async def trajectories(
        self,
        *,
        task_ids: Collection[str] | None = None,
        group_ids: Collection[str] | None = None,
        start: int | str | Mapping[tuple[str, int], int] = "earliest",
        follow: bool = True,
    ) -> AsyncIterator[Trajectory | GroupClosed]:
        """Trajectories and closed groups in log order per group; read committed, so each comes once.

        Args:
            task_ids, group_ids: only these; None: all.
            start: `earliest`, `latest`, milliseconds since the epoch, or the offsets to go on at.
            follow: wait for more at the end of the log; False: stop there.
        """
        async for record in self.records(task_ids=task_ids, group_ids=group_ids, start=start, follow=follow):
            assert isinstance(record.value, Trajectory | GroupClosed)
            yield record.value

    async def records(
        self,
        *,
        task_ids: Collection[str] | None = None,
        group_ids: Collection[str] | None = None,
        start: int | str | Mapping[tuple[str, int], int] = "earliest",
        follow: bool = True,
    ) -> AsyncIterator[Record]:
        """As `trajectories`, with each record's place on the log, for a trainer that keeps its own offsets."""
        reader = await self.bus.reader(["trajectories"], start=start)  # type: ignore[arg-type]
        try:
            async for record in _records(reader, follow):
                event = record.value
                if isinstance(event, Trajectory):
                    wanted = task_ids is None or event.task_id in task_ids
                elif isinstance(event, GroupClosed):
                    wanted = task_ids is None or not set(event.tasks).isdisjoint(task_ids)
                else:
                    continue
                if wanted and (group_ids is None or event.group_id in group_ids):
                    yield record
        finally:
            await reader.close()

    async def result(self, session_id: str) -> SessionResult | None:
        """What became of a session, or None while it has not finished (or is forgotten)."""
        key = f"s/{session_id}"
        found: SessionResult | None = None
        partition = self.bus.partition_of("results", key)
        reader = await self.bus.reader(["results"], partitions={"results": [partition]})
        try:
            async for record in reader.to_end():
                if record.key == key and isinstance(record.value, SessionResult):
                    found = record.value
        finally:
            await reader.close()
        return found

    async def results(self) -> tuple[dict[str, TaskResult], dict[str, SessionResult]]:
        """All task and session results on the log, by id."""
        tasks: dict[str, TaskResult] = {}
        sessions: dict[str, SessionResult] = {}
        reader = await self.bus.reader(["results"])
        try:
            async for record in reader.to_end():
                if isinstance(record.value, TaskResult):
                    tasks[record.value.task_id] = record.value
                elif isinstance(record.value, SessionResult):
                    sessions[record.value.session_id] = record.value
        finally:
            await reader.close()
        return tasks, sessions

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """A finished session's trajectory, looked up by its result."""
        result = await self.result(session_id)
        if result is None or result.trajectory is None:
            return None
        record = await self.bus.lookup(result.trajectory)
        assert isinstance(record.value, Trajectory)
        return record.value

    async def nodes(self, *, within_ms: int = 15_000) -> list[NodeHeartbeat]:
        """The nodes whose last beat is at most `within_ms` old by this machine's clock."""
        beats: dict[str, NodeHeartbeat] = {}
        reader = await self.bus.reader(["nodes"])
        try:
            async for record in reader.to_end():
                if isinstance(record.value, NodeHeartbeat) and record.key is not None:
                    beats[record.key] = record.value
        finally:
            await reader.close()
        oldest = self.clock.now_ms() - within_ms
        return [beat for beat in beats.values() if beat.at_ms >= oldest]


async def _records(reader: Reader, follow: bool) -> AsyncIterator[Record]:
    if not follow:
        async for record in reader.to_end():
            yield record
        return
    while True:
        for record in await reader.poll(timeout_s=0.5):
            yield record
