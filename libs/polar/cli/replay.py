"""`polar replay`: trajectories that are there, published again elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from polar.bus import Record
from polar.client import PolarClient
from polar.client.ranges import Bounds, Stretch, bounds
from polar.schemas import GroupClosed, Trajectory

from .counting import counted, size
from .output import BAD_INPUT, complain, console, fail, json_line, new_client, run_async, warn
from .progress import Bar, bar
from .replay_plan import Evidence
from .target import TopicTarget, check_topic_name, to_topic
from .times import Window, rate, window

EXAMPLES = """\b
Examples:
  polar replay --task 01a1fe23-7527-7581-8bb9-b504684bebd4 --to-topic trainer.debug
  polar replay --since 1d --to-topic trajectories.yesterday --rate 20/s

Key and bytes are those of polar.trajectories; the header replayed-from says where a record stands there. Doing it
again publishes it again: readers tell doubles by their trajectory ids.

Exit codes: 0 published, 1 a task or group is unknown, unfinished or partly gone (nothing is published without
--partial), 2 wrong options.
"""
TOPIC = "trajectories"
REPLAYED_FROM = "replayed-from"
MARGIN_MS = 3_600_000
"""By how much time stamps of one partition may be out of order: several finishers write it, each by its own clock."""


@dataclass(slots=True)
class _Done:
    """What was published."""

    trajectories: int = 0
    groups: int = 0
    tasks: set[str] = field(default_factory=set)
    bytes: int = 0
    unreadable: int = 0
    problems: list[str] = field(default_factory=list)


def replay(
    task: Annotated[list[str] | None, typer.Option(metavar="ID", help="This task's; repeatable.")] = None,
    group: Annotated[list[str] | None, typer.Option(metavar="ID", help="This group's; repeatable.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Published since then: 2h, 3d ago, or a time like 2026-05-01T12:00Z."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Published before then.")] = None,
    to_topic_: Annotated[
        str, typer.Option("--to-topic", metavar="NAME", help="A topic that is none of Polar's own; made if missing.")
    ] = "",
    rate_: Annotated[
        str | None, typer.Option("--rate", metavar="N/s", help="At most so many records a second.")
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Also where something is missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Publish trajectories again to another topic, unchanged.

    Of tasks, of groups, or all of a time; their closed groups after them, in the order of the log.
    """
    by_time = since is not None or until is not None
    if sum((bool(task), bool(group), by_time)) != 1:
        fail("choose one of --task, --group, and a time (--since, --until)", code=BAD_INPUT)
    if not to_topic_:
        fail("--to-topic says where to", code=BAD_INPUT)
    per_second = None if rate_ is None else rate(rate_, "--rate")
    client = new_client()
    check_topic_name(to_topic_, client.bus.settings)
    times = window(since, until, client.clock.now_ms())
    evidence = Evidence(tasks=frozenset(task or ()), groups=frozenset(group or ()))
    done = _Done()

    async def main() -> None:
        async with client:
            with bar() as progress:
                replaying = _Replaying(client, progress, evidence, times, per_second)
                wanted = await replaying.find(done)
                if done.problems and not partial:
                    for line in done.problems[1:]:
                        complain().print(line, markup=False, soft_wrap=True)
                    fail(done.problems[0], hint="nothing was published; --partial publishes what there is")
                for line in [*done.problems, *evidence.notices()]:
                    warn(line)
                async with to_topic(client.bus, to_topic_) as target:
                    await replaying.publish(wanted, target, done)
            _tell(done, target, as_json=as_json)

    run_async(main)


class _Replaying:
    """One run of the command."""

    def __init__(
        self, client: PolarClient, progress: Bar, evidence: Evidence, times: Window, per_second: float | None
    ) -> None:
        self._client = client
        self._progress = progress
        self._evidence = evidence
        self._times = times
        self._per_second = per_second

    async def find(self, done: _Done) -> dict[int, Bounds]:
        """The first pass: where what is wanted stands, and whether it is all there."""
        found = await bounds(self._client.bus, TOPIC, since_ms=self._times.since_ms)
        if self._times.until_ms is not None:
            later = await bounds(self._client.bus, TOPIC, since_ms=self._times.until_ms + MARGIN_MS)
            found = {one: Bounds(start, max(start, later[one].start)) for one, (start, _) in found.items()}
        if not self._evidence.tasks and not self._evidence.groups:
            return found
        wanted: dict[int, Bounds] = {}
        async with aclosing(self._read(found, "looking")) as records:
            async for record in records:
                if isinstance(record.value, Trajectory | GroupClosed) and self._evidence.take(record.value):
                    first = wanted.get(record.partition, Bounds(record.offset, 0)).start
                    wanted[record.partition] = Bounds(first, record.offset + 1)
        done.problems = self._evidence.problems()
        if done.problems and self._evidence.tasks:
            results, _ = await self._client.results()
            state = await self._client.scheduler_state()
            done.problems = self._evidence.problems(frozenset(results), frozenset(state.tasks))
        return wanted

    async def publish(self, where: dict[int, Bounds], target: TopicTarget, done: _Done) -> None:
        """The second pass."""
        clock = self._client.clock
        due = clock.monotonic()
        everything = not self._evidence.tasks and not self._evidence.groups
        async with aclosing(self._read(where, "publishing")) as records:
            async for record in records:
                event = record.value
                if not isinstance(event, Trajectory | GroupClosed):
                    done.unreadable += record.error is not None
                    continue
                if not (self._in_time(record) if everything else self._evidence.take(event)):
                    continue
                if self._per_second is not None:
                    await target.flush()
                    await clock.sleep(max(0.0, due - clock.monotonic()))
                    due = max(due, clock.monotonic()) + 1 / self._per_second
                assert record.raw is not None
                place = f"{record.topic}/{record.partition}/{record.offset}".encode()
                await target.put(record.key, record.raw, [*record.headers.items(), (REPLAYED_FROM, place)])
                done.bytes += len(record.raw)
                if isinstance(event, Trajectory):
                    done.trajectories += 1
                    done.tasks.add(event.task_id)
                else:
                    done.groups += 1

    def _in_time(self, record: Record) -> bool:
        since_ms, until_ms = self._times
        if since_ms is not None and record.timestamp_ms < since_ms:
            return False
        return until_ms is None or record.timestamp_ms < until_ms

    async def _read(self, where: dict[int, Bounds], doing: str) -> AsyncGenerator[Record]:
        total, done = sum(end - start for start, end in where.values()), 0
        for partition, (start, end) in sorted(where.items()):
            stretch = Stretch(self._client.bus, TOPIC, partition, start, end)
            async with aclosing(stretch.batches()) as batches:
                async for batch in batches:
                    for record in batch:
                        yield record
                    self._progress(doing, done + stretch.position - start, total)
            done += end - start


def _tell(done: _Done, target: TopicTarget, *, as_json: bool) -> None:
    if as_json:
        summary: dict[str, Any] = {
            "target": target.told(),
            "trajectories": done.trajectories,
            "groups": done.groups,
            "tasks": len(done.tasks),
            "bytes": done.bytes,
            "unreadable": done.unreadable,
            "problems": done.problems,
        }
        json_line(summary)
        return
    out = console()
    if not target.count:
        out.print("nothing was published in that time", soft_wrap=True)
        return
    parts = (
        counted(done.trajectories, "trajectory", "trajectories"),
        f"of {counted(len(done.tasks), 'task')}",
        f"and {counted(done.groups, 'closed group')} ({size(done.bytes)})",
    )
    out.print(f"{' '.join(parts)} published again to {target.told()}", markup=False, soft_wrap=True)
    if done.unreadable:
        warn(f"{done.unreadable} records of polar.trajectories cannot be read by this version and were left out")
