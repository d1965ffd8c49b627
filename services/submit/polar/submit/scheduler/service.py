"""The scheduler's shell: reads the log, steps the machine, writes its decisions in transactions.

Leadership needs no election. Whoever starts the producer `polar-scheduler` fences the predecessor, whose next
transaction fails; who is fenced becomes a standby, which follows the ticks and takes over when they stay away. All
state is in `polar.leases`, so a leader that fails in any way starts anew from there.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress

import structlog
from msgspec.structs import replace

from polar.bus import Bus, BusError, Fenced, Out, Reader, Record, Transactional
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
    Tick,
    encode,
    sha256,
)
from polar.schemas.validation import Limits, Refused, check, parse, unrecordable
from polar.schemas.wire import JSON

from .core import Scheduler
from .grading import SignBox
from .settings import SchedulerSettings
from .world import Emit

TRANSACTIONAL_ID = "polar-scheduler"
INPUTS = ("tasks", "stages", "nodes")
CURSORED = ("tasks", "stages")
"""`nodes` is compacted and small: it is read whole at each start."""
TASK_SHARE = 2
"""A task takes at most this part of a record: it is handed out, and given back with a trajectory, inside of others."""
TRIES = 2
"""A record at which the machine fails is read so often before it goes to `dead`."""

log = structlog.get_logger("polar.submit.scheduler")


class Poisoned(Exception):
    """The machine failed at a record; what it holds is no longer to be trusted."""

    def __init__(self, record: Record, cause: Exception) -> None:
        super().__init__(f"{record.topic}/{record.partition}/{record.offset}: {type(cause).__name__}: {cause}")
        self.ref = record.ref


class SchedulerService:
    """Runs until cancelled, as leader or standby; every decision is written before anything acts on it."""

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        limits: Limits,
        sign_box: SignBox,
        *,
        leader_id: str,
        inline_instruction_bytes: int,
    ) -> None:
        """`leader_id` tells this process's ticks from another's; a new one for each process."""
        self._bus = bus
        self._settings = settings
        self._limits = limits
        self._sign_box = sign_box
        self._leader_id = leader_id
        self._inline = inline_instruction_bytes
        self._terms = 0
        self._suspects: Counter[RecordRef] = Counter()
        self.leading = asyncio.Event()
        """Set while this process leads and has read its state."""

    async def run(self) -> None:
        standby = False
        while True:
            if standby:
                await self._stand_by()
            try:
                await self._lead()
            except Fenced:
                log.warning("another scheduler leads now; standing by")
                standby = True
            except BusError as error:
                if not error.retryable:
                    raise
                log.warning("the log failed the leader; starting anew from it", error=str(error))
                standby = False
                await self._bus.clock.sleep(self._settings.tick_seconds)
            except Poisoned as poisoned:
                self._suspects[poisoned.ref] += 1
                trace = await asyncio.to_thread(traceback.format_exception, poisoned)  # reads source files
                log.error(
                    "a record cannot be taken; starting anew from the log",
                    tries=self._suspects[poisoned.ref],
                    exception="".join(trace),
                )
                standby = False
            finally:
                self.leading.clear()

    async def _stand_by(self) -> None:
        """Return when two reads of `polar.nodes` to its end, `leader_silence` apart, held no tick."""
        reader = await self._bus.reader(["nodes"], start="latest")
        silent = 0
        try:
            while silent < 2:
                await self._bus.clock.sleep(self._settings.leader_silence)
                heard = False
                ends = await reader.ends()
                while not reader.reached(ends):
                    records = await reader.poll(timeout_s=0.2)
                    heard = heard or any(isinstance(one.value, Tick) for one in records)
                silent = 0 if heard else silent + 1
        finally:
            await reader.close()
        log.info("no tick for too long; taking over", silence_s=2 * self._settings.leader_silence)

    async def _lead(self) -> None:
        transactional = await self._bus.transactional(TRANSACTIONAL_ID)
        try:
            self._terms += 1
            term = _Term(
                self._bus,
                transactional,
                Scheduler(self._settings, self._limits, self._sign_box),
                f"{self._leader_id}/{self._terms}",
                self._settings,
                self._inline,
                {ref for ref, tries in self._suspects.items() if tries >= TRIES},
            )
            await term.lead(self.leading)
        finally:
            await transactional.close()


class _Term:
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
        self._dirty_cursors: dict[tuple[str, int], int] = {}
        self._dead: list[Out] = []

    async def lead(self, leading: asyncio.Event) -> None:
        await self._restore_ticking()
        reader = await self._bus.reader(INPUTS, start=dict(self._cursors))  # no cursor: from the beginning
        clock = self._bus.clock
        try:
            ends = await reader.ends()
            due = clock.monotonic()
            while True:
                records = await reader.poll(max_records=self._settings.max_batch, timeout_s=self._settings.poll_seconds)
                self._machine.advance(clock.now_ms())
                # reports before beats: a beat may lack what a report in the same batch explains
                for record in sorted(records, key=lambda one: one.topic == "nodes"):
                    await self._feed(record)
                self._move_cursors(reader)
                if not self._machine.caught_up and reader.reached(ends):
                    self._machine.catch_up()
                    leading.set()
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

    async def _restore_ticking(self) -> None:
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
            await self._restore()
        finally:
            restored.set()
            # to its end: a transaction that is cut short would be the end of the producer
            (failed,) = await asyncio.gather(ticking, return_exceptions=True)
        if failed is not None:
            raise failed

    async def _restore(self) -> None:
        machine = self._machine
        machine.advance(self._bus.clock.now_ms())
        reader = await self._bus.reader(["leases"])
        try:
            for record in await _to_end(reader):
                if record.key is None or record.error is not None:
                    raise RuntimeError(f"unreadable row at {record.ref}: {record.error}")
                if isinstance(record.value, Cursor):
                    _, topic, partition = record.key.split("/")
                    self._cursors[topic, int(partition)] = record.value.next
                else:
                    machine.world.restore(record.key, record.value)
        finally:
            await reader.close()
        for task_id in list(machine.world.sessions_of):
            state = machine.world.tasks[task_id]
            record = await self._bus.lookup(state.source)
            parsed = _request_of(record)
            assert isinstance(parsed, TaskRequest)
            request, _ = await self._with_claim(replace(parsed, task_id=task_id))
            try:
                request = check(request, machine.limits).task
            except Refused as refused:
                # accepted under other limits: it goes on as it was
                log.warning("an accepted task would be refused now", task_id=task_id, reason=str(refused))
            machine.world.know_request(request)
        machine.restored()

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
            # a conflict is answered to whoever sent it; there is nothing for an operator to mend
            if problems and not {one.code for one in problems} & {"conflict", "too_late"}:
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
        async with self._transactional.transaction() as transaction:
            refs = await transaction.send(*outs) if outs else []
            self._note_offsets(emits, refs)
            rows = [Out("leases", key, value) for key, value in world.take_dirty()]
            rows += [
                Out("leases", f"c/{topic}/{partition}", Cursor(next=after, replay_from=after))
                for (topic, partition), after in self._dirty_cursors.items()
            ]
            if rows:
                await transaction.send(*rows)
        self._dead.clear()
        self._dirty_cursors.clear()

    def _tick(self) -> Out:
        self._ticks += 1
        tick = Tick(leader_id=self._leader_id, number=self._ticks, at_ms=self._bus.clock.now_ms())
        return Out("nodes", "tick", tick)

    def _note_offsets(self, emits: Sequence[Emit], refs: Sequence[RecordRef]) -> None:
        for emit, ref in zip(emits, refs, strict=False):
            if isinstance(emit.value, SessionAssigned):
                self._machine.assigned_at(emit.value.assignment_id, emit.value.session_id, ref.offset)
            elif isinstance(emit.value, GradeAssigned):
                self._machine.assigned_at(emit.value.grade_id, emit.value.session_id, ref.offset)


async def _to_end(reader: Reader) -> list[Record]:
    return [record async for record in reader.to_end()]


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
