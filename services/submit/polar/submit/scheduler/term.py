"""One leadership: reads the log, steps the machine, writes its decisions in transactions.

A term begins with a started producer, which has fenced every other, restores the state, goes on at its cursors, and
ends by failing, by being fenced or by being cancelled. Nothing of it outlives it but the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import structlog
from msgspec.structs import replace

from polar.bus import Bus, BusError, Out, Reader, Record, RecordGone, Transactional, open_at_cursors
from polar.schemas import (
    CancelRequest,
    CloseRequest,
    Cursor,
    GradeAssigned,
    NodeHeartbeat,
    Problem,
    RecordRef,
    SessionAssigned,
    StageChanged,
    TaskRequest,
    TaskState,
    Tick,
    encode,
    sha256,
)
from polar.schemas.validation import Refused, check, parse, unrecordable
from polar.schemas.wire import JSON

from .core import Scheduler
from .settings import SchedulerSettings
from .turns import TICK_KEY
from .world import Emit

INPUTS = ("tasks", "stages", "nodes")
CURSORED = ("tasks", "stages")
"""`nodes` is compacted and small: it is read whole at each start."""
TASK_SHARE = 2
"""A task takes at most this part of a record: it is handed out, and given back with a trajectory, inside of others."""
ANSWERED = frozenset({"conflict", "too_late", "busy"})
"""Problems that are answered to whoever sent the task; there is nothing for an operator to mend."""

log = structlog.get_logger("polar.submit.scheduler")


class Poisoned(Exception):
    """The machine failed at a record; what it holds is no longer to be trusted."""

    def __init__(self, record: Record, cause: Exception) -> None:
        super().__init__(f"{record.topic}/{record.partition}/{record.offset}: {type(cause).__name__}: {cause}")
        self.ref = record.ref


class Term:
    """One leadership: from reading the state to being fenced, failing or stopping."""

    def __init__(
        self,
        bus: Bus,
        transactional: Transactional,
        machine: Scheduler,
        leader_id: str,
        settings: SchedulerSettings,
        inline: int,
        poison: Collection[RecordRef],
    ) -> None:
        self._bus = bus
        self._poison = poison
        self._transactional = transactional
        self._machine = machine
        self._leader_id = leader_id
        self._settings = settings
        self._inline = inline
        self._ticks = 0
        self._cursors: dict[tuple[str, int], int] = {}
        self._cursors_ms: dict[tuple[str, int], int] = {}
        """When each was written."""
        self._dirty_cursors: dict[tuple[str, int], int] = {}
        self._dead: list[Out] = []

    async def lead(self, leads: Callable[[], None], alive: Callable[[], None]) -> None:
        """Never returns. `leads` is called once, when the state is read; `alive` at every step.

        Raises:
            Fenced: another leads now.
            RecordTooLarge: with the record; nothing was written.
            RecordGone: the log has lost records that were to be read; the message names them.
            Poisoned: the machine failed at a record.
            BusError: the log failed; what was decided is read from it again.
        """
        await self._restore_ticking(alive)
        reader = await self._open_inputs()
        clock = self._bus.clock
        try:
            ends = await reader.ends()
            due = clock.monotonic()
            while True:
                alive()
                records = await reader.poll(max_records=self._settings.max_batch, timeout_s=self._settings.poll_seconds)
                self._machine.advance(clock.now_ms())
                # reports before beats: a beat may lack what a report in the same batch explains
                for record in sorted(records, key=lambda one: one.topic == "nodes"):
                    await self._feed(record)
                self._move_cursors(reader)
                if not self._machine.caught_up and reader.reached(ends):
                    self._machine.catch_up()
                    leads()
                    log.info(
                        "leading",
                        leader=self._leader_id,
                        sessions=len(self._machine.world.leases),
                        tasks=len(self._machine.world.tasks),
                        nodes=len(self._machine.world.nodes),
                    )
                ticking = clock.monotonic() >= due
                if ticking:
                    due = max(due + self._settings.tick_seconds, clock.monotonic())
                    self._machine.tick(clock.now_ms())
                if self._machine.caught_up:
                    self._machine.decide()
                await self._commit(ticking)
        finally:
            await reader.close()

    async def _open_inputs(self) -> Reader:
        """At the cursors; where there is none, from the beginning."""
        wanted = {
            place: Cursor(next=after, replay_from=after, at_ms=self._cursors_ms.get(place, 0))
            for place, after in self._cursors.items()
        }
        reader, moved = await open_at_cursors(
            self._bus, INPUTS, wanted, owner="the scheduler", accept_loss=self._settings.accept_loss
        )
        for place, cursor in moved.items():
            self._cursors[place] = self._dirty_cursors[place] = cursor.next
        return reader

    async def _restore_ticking(self, alive: Callable[[], None]) -> None:
        """`_restore`, with ticks meanwhile: a standby must not take a long one for a dead leader."""
        restored = asyncio.Event()

        async def tick_on() -> None:
            while not restored.is_set():
                async with self._transactional.transaction() as transaction:
                    await transaction.send(self._tick())
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.tick_seconds):
                        await restored.wait()

        ticking = asyncio.create_task(tick_on())
        try:
            await self._restore(alive)
        finally:
            restored.set()
            # to its end: a transaction that is cut short would be the end of the producer
            (failed,) = await asyncio.gather(ticking, return_exceptions=True)
        if failed is not None:
            raise failed

    async def _restore(self, alive: Callable[[], None]) -> None:
        machine = self._machine
        machine.advance(self._bus.clock.now_ms())
        reader = await self._bus.reader(["leases"])
        try:
            async for record in reader.to_end():
                alive()
                if record.key is None or record.error is not None:
                    raise RuntimeError(f"unreadable row at {record.ref}: {record.error}")
                if isinstance(record.value, Cursor):
                    _, topic, partition = record.key.split("/")
                    self._cursors[topic, int(partition)] = record.value.next
                    self._cursors_ms[topic, int(partition)] = record.value.at_ms
                else:
                    machine.world.restore(record.key, record.value)
        finally:
            await reader.close()
        tasks = [machine.world.tasks[task_id] for task_id in machine.world.sessions_of]
        # a source is one task's: the ids of sessions derive from it
        of = {task.source: task for task in tasks}
        async for ref, found in self._bus.lookup_many(list(of)):
            alive()
            await self._restore_task(of[ref], found)
        machine.restored()

    async def _restore_task(self, task: TaskState, found: Record | RecordGone) -> None:
        parsed: TaskRequest | CancelRequest | CloseRequest | None = None
        if isinstance(found, Record):
            with suppress(Refused):
                parsed = _request_of(found)
        if not isinstance(parsed, TaskRequest):
            reason = str(found) if isinstance(found, RecordGone) else f"{found.ref} is no task"
            log.error("the record of an accepted task is lost", task_id=task.task_id, reason=reason)
            self._machine.world.lose_task(task, f"the task's record is lost: {reason}")
            return
        request, _ = await self._with_claim(replace(parsed, task_id=task.task_id))
        try:
            request = check(request, self._machine.limits).task
        except Refused as refused:
            # accepted under other limits: it goes on as it was
            log.warning("an accepted task would be refused now", task_id=task.task_id, reason=str(refused))
        self._machine.world.know_request(request)

    def _move_cursors(self, reader: Reader) -> None:
        """To where the reader is: past the markers of transactions too, so that no cursor of a quiet partition falls
        behind the start of its log."""
        for place, position in reader.positions().items():
            if place[0] in CURSORED and position > self._cursors.get(place, 0):
                self._cursors[place] = self._dirty_cursors[place] = position

    async def _feed(self, record: Record) -> None:
        if self._poison and record.ref in self._poison:
            if record.topic in CURSORED:
                await self._bury(record, "the scheduler failed at it; its log says how")
            return
        try:
            await self._take(record)
        except (BusError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise Poisoned(record, error) from error

    async def _take(self, record: Record) -> None:
        if record.topic == "tasks":
            await self._take_task(record)
            return
        match record.value:
            case StageChanged():
                self._machine.on_stage(record.value)
            case NodeHeartbeat():
                self._machine.on_heartbeat(record.value)
            case Tick():
                if record.value.leader_id == self._leader_id:
                    self._machine.on_own_tick()
            case None if record.error is not None and record.topic in CURSORED:
                await self._bury(record, str(record.error))
            case _:
                pass  # its own answers to tasks

    async def _take_task(self, record: Record) -> None:
        try:
            request = _request_of(record)
            if isinstance(request, CancelRequest):
                self._machine.on_cancel(request)
            elif isinstance(request, CloseRequest):
                message = "manual sessions are not part of this version"
                raise Refused([Problem(field="type", message=message, code="not_available")], request.task_id)
            elif problems := unrecordable(request):
                raise Refused(problems, request.task_id)
            else:
                await self._accept(record, request)
        except Refused as refused:
            self._machine.reject(record.ref, refused.task_id, refused.problems)
            await self._bury(record, str(refused))

    async def _accept(self, record: Record, request: TaskRequest) -> None:
        request, body = await self._with_claim(request)
        size, most = len(encode(request)), self._bus.settings.max_record_bytes // TASK_SHARE
        if size > most:
            message = (
                f"takes {size} bytes besides its instruction and may take {most}; move files out of "
                "`runtime.prepare` and `metadata`"
            )
            raise Refused([Problem(field="", message=message)], request.task_id)
        before = len(self._machine.world.out)
        self._machine.on_task(record.ref, request, body)
        for emit in self._machine.world.out[before:]:
            problems = getattr(emit.value, "problems", None)
            if problems and not {one.code for one in problems} & ANSWERED:
                await self._bury(record, "; ".join(f"{one.field}: {one.message}" for one in problems))

    async def _with_claim(self, request: TaskRequest) -> tuple[TaskRequest, str]:
        """The request with a long instruction as a claim, and the hash of its original body."""
        instruction = request.instruction
        if isinstance(instruction, str):
            data = instruction.encode()
            digest = sha256(data)
            if len(data) > self._inline:
                claim = await self._bus.blobs.put(data, "text/plain; charset=utf-8")
                request = replace(request, instruction=claim)
        else:
            digest = instruction.sha256
        return request, sha256(replace(request, instruction=digest))

    async def _bury(self, record: Record, error: str) -> None:
        """A dead letter in the same transaction as the cursor that passes the record."""
        self._dead.append(await self._bus.dead_out(record, error))

    async def _commit(self, ticking: bool) -> None:
        """Decisions, dead letters, tick, changed rows and cursors: all or none."""
        world = self._machine.world
        emits = world.take_out()
        if not (emits or self._dead or ticking or world.has_dirty):
            return
        outs = [Out(one.topic, one.key, one.value, source=one.source) for one in emits]
        outs += self._dead
        if ticking:
            outs.append(self._tick())
        now_ms = self._bus.clock.now_ms()
        async with self._transactional.transaction() as transaction:
            refs = await transaction.send(*outs) if outs else []
            self._note_offsets(emits, refs)
            rows = [Out("leases", key, value) for key, value in world.take_dirty()]
            rows += [
                Out("leases", f"c/{topic}/{partition}", Cursor(next=after, replay_from=after, at_ms=now_ms))
                for (topic, partition), after in self._dirty_cursors.items()
            ]
            if rows:
                await transaction.send(*rows)
        self._dead.clear()
        self._dirty_cursors.clear()

    def _tick(self) -> Out:
        self._ticks += 1
        tick = Tick(leader_id=self._leader_id, number=self._ticks, at_ms=self._bus.clock.now_ms())
        return Out("nodes", TICK_KEY, tick)

    def _note_offsets(self, emits: Sequence[Emit], refs: Sequence[RecordRef]) -> None:
        for emit, ref in zip(emits, refs, strict=False):
            if isinstance(emit.value, SessionAssigned):
                self._machine.assigned_at(emit.value.assignment_id, emit.value.session_id, ref.offset)
            elif isinstance(emit.value, GradeAssigned):
                self._machine.assigned_at(emit.value.grade_id, emit.value.session_id, ref.offset)


def about(out: Out) -> str | None:
    """The session, task or group that a record of the scheduler's is about."""
    for name in ("session_id", "task_id", "group_id"):
        found = getattr(out.value, name, None)
        if isinstance(found, str):
            return found
    return None


def _request_of(record: Record) -> TaskRequest | CancelRequest | CloseRequest:
    """A value of `polar.tasks`: MessagePack from Polar's own clients, JSON from anyone's.

    Raises:
        Refused: with field and reason.
    """
    raw = record.raw
    if raw is None:
        raise Refused([Problem(field="", message="is empty: a task is a JSON object", code="missing")])
    declared = record.headers.get("content-type", b"").decode("ascii", "replace")
    if declared.startswith(JSON) or raw.lstrip()[:1] in (b"{", b"["):
        return parse(raw)
    if isinstance(record.value, TaskRequest | CancelRequest | CloseRequest):
        return record.value
    problem = record.error.problem if record.error else Problem(field="", message="is neither JSON nor a task record")
    raise Refused([problem])
