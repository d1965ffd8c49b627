"""Tasks in, trajectories out: what users, trainers and the command line import.

Everything goes over the log; no service is called. A trainer's loop is

    async with PolarClient(BusSettings()) as client:
        accepted = await client.submit(task)
        async for event in client.trajectories(task_ids={accepted.task_id}):
            if isinstance(event, GroupClosed): ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from types import TracebackType
from typing import NamedTuple, Self

from msgspec.structs import replace

from polar.bus import Bus, BusSettings, Out, Reader, Record
from polar.bus.errors import TopicsWrong
from polar.bus.reader import Start
from polar.schemas import (
    CancelRequest,
    Claim,
    DecodeError,
    GroupClosed,
    GroupState,
    Lease,
    NodeHeartbeat,
    Problem,
    SessionResult,
    StageChanged,
    TaskAccepted,
    TaskRejected,
    TaskRequest,
    TaskResult,
    TaskState,
    Tick,
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


class SchedulerState(NamedTuple):
    """What the scheduler knows, as its records in `polar.leases` have it."""

    tasks: dict[str, TaskState]
    """By task id; kept for days after the end."""
    groups: dict[str, GroupState]
    """By group id."""
    leases: dict[str, Lease]
    """Sessions by id, from acceptance until shortly after they have finished."""


class PolarClient:
    """An async context manager around one connection to the log.

    Entering it checks that the topics have the partitions that these settings say: a wrong number would hide records.

    Raises (on entering):
        BrokerUnavailable: no broker answers.
        TopicsWrong: topics are missing, or have another number of partitions.
    """

    def __init__(
        self, settings: BusSettings, *, clock: Clock | None = None, randomness: Randomness | None = None
    ) -> None:
        self.clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self.bus = Bus(settings, Service.USER, clock=self.clock)

    async def __aenter__(self) -> Self:
        await self.bus.__aenter__()
        try:
            await self._check_topics()
        except BaseException:
            await self.bus.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.bus.__aexit__(kind, error, trace)

    async def _check_topics(self) -> None:
        try:
            await self.bus.check_topics()
        except TopicsWrong as error:
            # how long records are kept is the operator's business
            hiding = [one for one in error.problems if one.setting in ("topic", "partitions")]
            if hiding:
                raise TopicsWrong(hiding) from None

    def new_id(self) -> str:
        """A UUIDv7."""
        return new_id(self.clock, self._randomness)

    async def keep(self, data: bytes, content_type: str = "application/octet-stream") -> Claim:
        """Put bytes into the blob store, e.g. a file for `PrepareAction.blob`."""
        return await self.bus.blobs.put(data, content_type)

    async def submit(self, task: TaskRequest, *, timeout_s: float = 20.0) -> TaskAccepted:
        """Publish a task and wait for the scheduler's answer. A task without an id gets one; the same task with the
        same id again is answered with what is known of it.

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

    async def stages(self, task_id: str, *, since_ms: int | None = None) -> AsyncGenerator[StageChanged | TaskResult]:
        """Each report on the task's sessions as it comes, and at last the task's result.

        Args:
            since_ms: when to start on the log, in ms since the epoch: before the acceptance. None: the beginning.
        """
        reader = await self.bus.reader(["stages", "results"], start="earliest" if since_ms is None else since_ms)
        try:
            result: TaskResult | None = None
            while result is None:
                for record in await reader.poll(timeout_s=0.5):
                    event = record.value
                    if isinstance(event, StageChanged) and event.task_id == task_id:
                        yield event
                    elif isinstance(event, TaskResult) and event.task_id == task_id:
                        result = event
            # what led to the result is in the log, but perhaps in a partition that has not been read so far
            async for record in reader.to_end():
                if isinstance(record.value, StageChanged) and record.value.task_id == task_id:
                    yield record.value
            yield result
        finally:
            await reader.close()

    async def trajectories(
        self,
        *,
        task_ids: Collection[str] | None = None,
        group_ids: Collection[str] | None = None,
        start: Start = "earliest",
        follow: bool = True,
    ) -> AsyncGenerator[Trajectory | GroupClosed]:
        """Trajectories and closed groups in log order per group; read committed, so each comes once.

        Args:
            task_ids, group_ids: only these; None: all.
            start: `earliest`, `latest`, milliseconds since the epoch, or the offsets to go on at.
            follow: wait for more at the end of the log; False: stop there.

        Raises:
            DecodeError: a record is no trajectory that this version can read.
        """
        found = self.records(task_ids=task_ids, group_ids=group_ids, start=start, follow=follow)
        async with aclosing(found) as records:
            async for record in records:
                assert isinstance(record.value, Trajectory | GroupClosed)
                yield record.value

    async def records(
        self,
        *,
        task_ids: Collection[str] | None = None,
        group_ids: Collection[str] | None = None,
        start: Start = "earliest",
        follow: bool = True,
    ) -> AsyncGenerator[Record]:
        """As `trajectories`, with each record's place on the log, for a trainer that keeps its own offsets."""
        if isinstance(task_ids, str) or isinstance(group_ids, str):
            raise TypeError("task_ids and group_ids are collections of ids, not one id")
        reader = await self.bus.reader(["trajectories"], start=start)
        try:
            async with aclosing(_records(reader, follow)) as records:
                async for record in records:
                    event = record.value
                    if record.error is not None:
                        raise record.error
                    if isinstance(event, Trajectory):
                        wanted = task_ids is None or event.task_id in task_ids
                    elif isinstance(event, GroupClosed):
                        wanted = task_ids is None or not set(event.tasks).isdisjoint(task_ids)
                    else:
                        continue  # a tombstone
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
        """A finished session's trajectory, looked up by its result; None while there is no result.

        Raises:
            RecordGone: the log has the result, but no longer the trajectory.
            DecodeError: the record is no trajectory that this version can read.
        """
        result = await self.result(session_id)
        if result is None or result.trajectory is None:
            return None
        record = await self.bus.lookup(result.trajectory)
        if not isinstance(record.value, Trajectory):
            place = f"offset {record.offset} of partition {record.partition} of `{record.topic}`"
            raise record.error or DecodeError(Problem(field="", message=f"{place} is no trajectory"))
        return record.value

    async def nodes(self, *, within_ms: int = 15_000) -> list[NodeHeartbeat]:
        """The nodes whose last beat is at most `within_ms` old by this machine's clock, by id."""
        oldest = self.clock.now_ms() - within_ms
        found = [one for one in (await self._beats()).values() if isinstance(one, NodeHeartbeat)]
        return sorted((one for one in found if one.at_ms >= oldest), key=lambda one: (one.node_id, one.half))

    async def leader(self, *, within_ms: int = 15_000) -> Tick | None:
        """The last sign of life of the scheduler, or None if there is none so young by this machine's clock."""
        oldest = self.clock.now_ms() - within_ms
        ticks = [one for one in (await self._beats()).values() if isinstance(one, Tick)]
        return next((one for one in ticks if one.at_ms >= oldest), None)

    async def scheduler_state(self) -> SchedulerState:
        """Every task, group and session that the scheduler has on its books."""
        found = SchedulerState({}, {}, {})
        reader = await self.bus.reader(["leases"])
        try:
            async for record in reader.to_end():
                kind, _, name = (record.key or "").partition("/")
                match record.value:
                    case TaskState():
                        found.tasks[record.value.task_id] = record.value
                    case GroupState():
                        found.groups[record.value.group_id] = record.value
                    case Lease():
                        found.leases[record.value.session_id] = record.value
                    case None if kind == "t":
                        found.tasks.pop(name, None)
                    case None if kind == "g":
                        found.groups.pop(name, None)
                    case None:
                        found.leases.pop(record.key or "", None)
        finally:
            await reader.close()
        return found

    async def _beats(self) -> dict[str, NodeHeartbeat | Tick]:
        beats: dict[str, NodeHeartbeat | Tick] = {}
        reader = await self.bus.reader(["nodes"])
        try:
            async for record in reader.to_end():
                if record.key is None:
                    continue
                if isinstance(record.value, NodeHeartbeat | Tick):
                    beats[record.key] = record.value
                else:
                    beats.pop(record.key, None)
        finally:
            await reader.close()
        return beats


async def _records(reader: Reader, follow: bool) -> AsyncGenerator[Record]:
    if not follow:
        async for record in reader.to_end():
            yield record
        return
    while True:
        for record in await reader.poll(timeout_s=0.5):
            yield record
