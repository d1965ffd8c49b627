"""What is known of every task, session and node, for those who ask: a SQLite file kept up with the log, its threads.

Promises:
- The rows and the offsets up to which the log has been read are one transaction (`viewfile.py`), so a process that is
  killed goes on where it was; a file that does not fit is thrown away and the log is read again.
- Two views that have read the log to the same end answer the same of every task and session, whatever the order in
  which they read its partitions and however often they were killed (`fold.py`).
- Nothing here blocks the event loop: one thread writes, `READERS` others answer, and neither waits for the other.
- Memory does not grow with tasks: in memory are counts, the nodes and the last answers, each bounded. The file is
  bounded too (`ViewLimits`). What went is forgotten here only; the log and the scheduler still have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import msgspec

from polar.schemas import RecordRef, Stage, TaskAccepted, TaskRejected, Tick

from . import lookups
from .entries import Answered, Applied, Change, NodeEntry, Place, Selected, TaskEntry, TaskFilter, ViewLimits
from .viewfile import ViewFile, files_fault, transaction
from .viewlock import ViewBroken, ViewUnusable, lock_slot

READERS = 2
LONG_ANSWER = 64
"""Session ids; an acceptance with more is kept in memory without them."""

P = ParamSpec("P")
T = TypeVar("T")


class Counts(NamedTuple):
    """Sizes, as of the last transaction."""

    tasks: int
    sessions: int
    dropped: int
    """Tasks forgotten because of the limits."""
    bytes: int


class View:
    """The view, open. Close it."""

    def __init__(self, limits: ViewLimits, file: ViewFile, writer: ThreadPoolExecutor, lock: int | None) -> None:
        """Use `open`."""
        self.limits = limits
        self.ready = False
        """The log's end, as it was at the start, has been reached."""
        self._file = file
        self._lock = lock
        self._writer = writer
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="view-reader")
        self._readers: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        self._answers: OrderedDict[RecordRef, TaskAccepted | TaskRejected] = OrderedDict()
        self._broken: str | None = None
        self._bytes = 0
        self._connected = 0
        self._closed = False

    @classmethod
    async def open(
        cls, path: Path, limits: ViewLimits | None = None, *, identity: str = "", share: bool = True
    ) -> View:
        """Open or make the file at `path`, or beside it where another process has that one.

        Args:
            identity: of the topics; a file made for others is thrown away.
            share: False: the caller makes sure that nobody else has the file.

        Raises:
            ViewUnusable: the file cannot be used; the message says what to do.
        """
        writer = ThreadPoolExecutor(1, thread_name_prefix="view-writer")
        bounds = limits or ViewLimits()

        def work() -> View:
            mine, lock = lock_slot(path) if share else (path, None)
            try:
                made = cls(bounds, ViewFile(mine, bounds, identity), writer, lock)
                made._connect()
            except BaseException:
                if lock is not None:
                    os.close(lock)
                raise
            return made

        try:
            return await asyncio.get_running_loop().run_in_executor(writer, work)
        except BaseException:
            writer.shutdown(wait=False)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what has begun, and close the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True

        def work() -> None:
            self._disconnect()
            self._file.close()
            if self._lock is not None:
                os.close(self._lock)

        await asyncio.get_running_loop().run_in_executor(self._writer, work)
        self._pool.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    # --- known without asking the file ---

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def nodes(self) -> Mapping[str, NodeEntry]:
        return self._file.nodes.nodes

    @property
    def tick(self) -> Tick | None:
        return self._file.nodes.tick

    @property
    def counts(self) -> Counts:
        file = self._file
        return Counts(file.tasks, file.sessions, file.dropped, self._bytes)

    def answer(self, ref: RecordRef) -> TaskAccepted | TaskRejected | None:
        """What the scheduler said of the request at `ref`; None: nothing yet, or long ago."""
        return self._answers.get(ref)

    def in_flight(self) -> dict[Stage, int]:
        """Sessions that are not finished, by stage."""
        return {stage: count for stage, count in list(self._file.flight.items()) if count}

    def next_offset(self, topic: str, partition: int) -> int:
        """The first offset of that partition that has not been applied."""
        return self._file.next.get((topic, partition), 0)

    def resume_at(self, topic: str, partition: int) -> int:
        """Where to go on reading: at the record read last, which shows whether the log is still the same one."""
        anchor = self._file.anchors.get((topic, partition))
        return self.next_offset(topic, partition) if anchor is None else anchor.offset

    def silent_ticks(self, node: NodeEntry) -> int:
        return self._file.nodes.ticks - node.at_tick

    def alive(self, node: NodeEntry) -> bool:
        return self.silent_ticks(node) < self.limits.dead_after_ticks

    # --- asked of the file ---

    async def task(self, task_id: str) -> TaskEntry | None:
        """A task with its sessions, perhaps one of which only sessions' reports are known (`known`)."""
        return await self._read(lookups.task, task_id)

    async def rejected(self, task_id: str) -> TaskRejected | None:
        """The last rejection of a task id."""
        return await self._read(lookups.rejected, task_id)

    async def settled(self, task_id: str) -> bool:
        """Whether a task has ended."""
        return await self._read(lookups.settled, task_id)

    async def select(self, wanted: TaskFilter) -> Selected:
        """The newest tasks that fit, newest first, without their sessions."""
        return await self._read(lookups.select, wanted)

    async def statuses(self, limit: int = 10_000) -> dict[str, str]:
        """Status by task id, of the newest `limit` tasks."""
        return await self._read(lookups.statuses, limit)

    async def ended_since(self, at_ms: int, limit: int) -> list[str]:
        """Tasks that ended then or later, oldest first; the newest `limit`."""
        return await self._read(lookups.ended_since, at_ms, limit)

    async def everything(self) -> Iterable[str]:
        """Every task that is known, by id."""
        return await self._read(lookups.everything)

    async def _read(
        self, look: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def work() -> T:
            db = self._readers.get()
            try:
                with transaction(db, "DEFERRED"):
                    return look(db, *args, **kwargs)
            except (sqlite3.Error, ValueError) as error:
                if isinstance(error, sqlite3.Error) and not files_fault(error):
                    raise
                self._broken = str(error)
                raise ViewBroken(f"the view's file cannot be read ({error}); it is being built anew") from error
            finally:
                self._readers.put(db)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # --- written by the feed ---

    async def apply(self, messages: Sequence[Any], names: Mapping[str, str]) -> Applied:
        """Take records of the log, as aiokafka gives them; those taken before change nothing.

        Args:
            names: topic without prefix, by its full name.

        Raises:
            ViewBroken: the file is corrupt, or was made from another log: `start_over`.
            ViewUnusable: it cannot be written now, e.g. for lack of space; nothing is lost by trying again.
        """
        applied = await self._write(lambda: self._file.apply(messages, names))
        for change in applied.changes:
            if isinstance(change, Answered):
                self._remember(change.answer)
        return applied

    async def misfit(self, cluster: str | None, starts: Mapping[Place, int], ends: Mapping[Place, int]) -> str | None:
        """Why the log is not the one the file was made from; None: it is, as far as its ends tell."""
        return await self._write(lambda: self._file.misfit(cluster, starts, ends))

    async def passed(self, positions: Mapping[Place, int]) -> None:
        """The reader stands at `positions`, by topic (without prefix) and partition, and all before is applied."""
        if any(to > self._file.next.get(place, -1) for place, to in positions.items()):
            await self._write(lambda: self._file.passed(positions))

    async def tidy(self) -> Sequence[Change]:
        """At the end of the log: settle what waits in vain, and keep to the limits. The first time, `ready` is set."""
        first, self.ready = not self.ready, True
        return await self._write(lambda: self._file.tidy(settle_all=first))

    async def start_over(self, reason: str) -> None:
        """Throw the file away; the log is to be read from its start."""
        self.ready = False

        def work() -> None:
            self._disconnect()
            self._file.start_over(reason)
            self._connect()

        await asyncio.get_running_loop().run_in_executor(self._writer, work)
        self._broken = None

    async def _write(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise RuntimeError("the view is closed")
        if self._broken is not None:
            raise ViewBroken(self._broken)

        def guarded() -> T:
            try:
                found = work()
                self._bytes = self._file.bytes
            except sqlite3.OperationalError as error:
                raise ViewUnusable(f"{self.path} cannot be written: {error}") from error
            except (sqlite3.Error, ValueError) as error:
                if isinstance(error, sqlite3.Error) and not files_fault(error):
                    raise
                raise ViewBroken(str(error)) from error
            return found

        return await asyncio.get_running_loop().run_in_executor(self._writer, guarded)

    def _connect(self) -> None:
        while self._connected < READERS:
            self._readers.put(self._file.connect())
            self._connected += 1

    def _disconnect(self) -> None:
        """Waits for the answers under way."""
        while self._connected:
            with contextlib.suppress(sqlite3.Error):
                self._readers.get().close()
            self._connected -= 1

    def _remember(self, answer: TaskAccepted | TaskRejected) -> None:
        if isinstance(answer, TaskAccepted) and len(answer.sessions) > LONG_ANSWER:
            answer = msgspec.structs.replace(answer, sessions=[])
        self._answers[answer.answers] = answer
        while len(self._answers) > self.limits.max_answers:
            self._answers.popitem(last=False)
