"""The audit on the log: takes a snapshot of it, reads that, and has it judged.

    report = await audit(bus)
    assert report.clean, report.offences

It reads without a group, read committed, and writes nothing, so it may run beside the services at any time. Everything
that takes processor time runs in a thread of its own.

The snapshot. Records are written in chains: a task's record, its acceptance, calls, a build, a grade, a trajectory. An
audit that read each topic to its end at some moment would find trajectories whose grade it had not seen yet, and halves
of transactions, whose partitions do not become readable at the same moment. So ends are taken twice, each time of
derived topics before those they derive from, and each time only when every transaction that had written below them is
over. `Reach` says what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from threading import Event
from typing import Any, Final, TypeVar

from polar.bus import Bus

from .core import Audit, AuditOptions, Progress
from .offsets import Offsets, Places
from .reach import Extent, Reach
from .report import AuditReport
from .views import BY_TOPIC

SINCE_SLACK_MS: Final = 3_600_000
"""How much is read before `since`: the records of a session's task stand before its own."""

Result = TypeVar("Result")


async def audit(bus: Bus, options: AuditOptions | None = None, *, progress: Progress | None = None) -> AuditReport:
    """Audits the log as it is now.

    Args:
        bus: opened, of any service; nothing is written.
        progress: told what is done, how much of it, and of how much; called in any thread.

    Raises:
        BusError: the log cannot be read; `retryable` says whether trying again can help.
        TopicsWrong: topics are missing, or not as this version needs them.
    """
    options = options or AuditOptions()
    clock = bus.clock
    began = clock.monotonic()
    await bus.check_topics()
    async with AsyncExitStack() as stack:
        offsets = await stack.enter_async_context(Offsets(bus))
        starts = await offsets.starts()
        since = None if options.since_ms is None else max(0, options.since_ms - SINCE_SLACK_MS)
        chosen = {} if since is None else await offsets.since(since)
        chosen = {where: offset for where, offset in chosen.items() if offset > starts[where]}
        starts |= chosen
        marks = await offsets.settled_ends()
        ends = await offsets.settled_ends()
        reach = Reach({where: Extent(starts[where], marks[where], ends[where]) for where in ends}, bus.partition_of)
        for topic, partition in chosen:
            assert since is not None
            reach.chosen(topic, partition, since)
        worker = _Worker(progress)
        stack.callback(worker.stop)
        judge = await worker(Audit, reach, options)
        stack.callback(worker.last, judge.close)
        await _feed(offsets, judge, worker, starts, ends)
        reach.starts_moved(await offsets.starts())
        await worker(judge.judge, worker.told)
        if judge.suspects:
            judge.absolve(await _seen(offsets, judge.suspects, ends))
        report: AuditReport = await worker(judge.report, clock.monotonic() - began)
        return report


class _Stopped(Exception):
    """Nobody waits for the audit any more; ends its thread."""


class _Worker:
    """A thread for what takes processor time: one call after the other."""

    def __init__(self, progress: Progress | None) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._stopped = Event()
        self._progress = progress

    async def __call__(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def told(self, doing: str, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Stopped
        if self._progress is not None:
            self._progress(doing, done, total)

    def last(self, call: Callable[[], None]) -> None:
        """`call` when what is being done is over; nobody waits for it."""
        self._stopped.set()
        self._thread.submit(call)

    def stop(self) -> None:
        self._thread.shutdown(wait=False)


async def _feed(offsets: Offsets, judge: Audit, worker: _Worker, starts: Places, ends: Places) -> None:
    total, done = sum(ends[where] - starts[where] for where in ends), 0
    rest = [one for one in BY_TOPIC if one != "leases"]
    async with AsyncExitStack() as stack:
        # they take a second to open, so both at once
        opened = await asyncio.gather(offsets.reader(["leases"], starts), offsets.reader(rest, starts))
        for reader in opened:
            stack.push_async_callback(reader.close)
        for reader in opened:
            before = reader.positions()
            goal = {where: ends[where] for where in before}
            if reader is opened[0]:
                # a row that compaction takes is replaced by a later one, so these are read as far as they go
                goal = {where: end for where, end in (await offsets.stable()).items() if where in before}
            async for records in offsets.batches(reader, goal):
                await worker(judge.feed, records)
                moved = sum(reader.positions().values()) - sum(before.values())
                worker.told("reading", min(total, done + moved), total)
            done += sum(reader.positions().values()) - sum(before.values())


async def _seen(offsets: Offsets, sessions: frozenset[str], ends: Places) -> set[str]:
    """Those of `sessions` that the log, as it is now, shows alive or finished."""
    found: set[str] = set()
    now = await offsets.stable()
    names = {f"s/{one}": one for one in sessions}
    for topic, start in (("leases", {}), ("results", ends)):
        start = {where: offset for where, offset in start.items() if where[0] == topic}
        reader = await offsets.reader([topic], start)
        try:
            async for records in offsets.batches(
                reader, {where: end for where, end in now.items() if where[0] == topic}
            ):
                if topic == "leases":
                    found |= {one.key for one in records if one.key in sessions and one.raw is not None}
                else:
                    found |= {names[one.key] for one in records if one.key in names}
        finally:
            await reader.close()
    return found
