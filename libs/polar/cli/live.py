"""A task's progress while one waits: a live table on a terminal, a calm line now and then elsewhere.

Failures and retries are told as they happen, each kind a few times; after that they are only counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polar.client import PolarClient
from polar.schemas import (
    Failure,
    GroupClosed,
    Stage,
    StageChanged,
    TaskAccepted,
    TaskResult,
    TaskState,
    Trajectory,
)
from polar.schemas.ids import session_id
from polar.service.clock import Clock

from .output import duration, plain_table, visible

STEPS: dict[Stage, str] = {
    Stage.REGISTERED: "queued",
    Stage.INITIALIZING: "preparing",
    Stage.READY: "ready",
    Stage.RUNNING: "running",
    Stage.ENDED: "building",
    Stage.CLOSED: "building",
    Stage.BUILT: "grading",
    Stage.EVALUATING: "grading",
    Stage.GRADED: "grading",
    Stage.FINISHED: "finished",
}
"""What people read for each stage, in the order in which a session passes them."""
NAMES = tuple(dict.fromkeys(STEPS.values()))
ORDER = {stage: number for number, stage in enumerate(STEPS)}
MARGIN_MS = 60_000
"""Reports may carry the clock of another machine."""
SAME_FAILURE = 3
"""Failures of one kind and message that are told one by one."""
ROWS_BESIDE = 12
"""Lines of a terminal that the live table leaves free."""
REFRESH_S = 0.25
CALM_S = 5.0
"""Between two lines of progress where the output is no terminal; twice as long after each, up to a minute."""
LATE_S = 15.0
"""How long records of an ended task are waited for: the partitions of a transaction become readable one by one."""


class Followed(NamedTuple):
    """The task that is followed."""

    task_id: str
    sessions: list[str]
    """Ids by sample."""
    since_ms: int
    """Nothing of the task is older on the log."""


async def followed(client: PolarClient, task: TaskAccepted | TaskState) -> Followed:
    """A task, from the scheduler's answer or its books."""
    source = task.source
    if isinstance(task, TaskState):
        count, at_ms = task.counts.accepted, task.accepted_at_ms
    else:
        count, at_ms = task.count, task.at_ms
        if task.answers != source:  # a repeat: the task itself is older than this answer
            at_ms = (await client.bus.lookup(source)).timestamp_ms
    sessions = [session_id(source.partition, source.offset, sample) for sample in range(count)]
    return Followed(task.task_id, sessions, at_ms - MARGIN_MS)


class Seen(NamedTuple):
    """Where a session is."""

    stage: Stage = Stage.REGISTERED
    attempt: int = 1
    since_s: float = 0.0
    reward: float | None = None
    failure: Failure | None = None
    """Of the attempt before, or of the session."""


class Progress:
    """What is known of a task's sessions; pure. Times are seconds of any clock that does not jump."""

    def __init__(self, task: Followed, now_s: float) -> None:
        self.task = task
        self.started_s = now_s
        self.sessions: dict[str, Seen] = {one: Seen(since_s=now_s) for one in task.sessions}
        self._samples = {one: sample for sample, one in enumerate(task.sessions)}
        self._told: Counter[tuple[str, str]] = Counter()

    def apply(self, event: StageChanged, now_s: float) -> str | None:
        """Take in a report; returns a line where a person should hear of it: a failure, a retry.

        A report that comes late, of an attempt or a stage that is over, changes nothing.
        """
        known = self.sessions.get(event.session_id)
        if known is None or (event.attempt, ORDER[event.stage]) <= (known.attempt, ORDER[known.stage]):
            return None
        failure = event.outcome.failure if event.outcome is not None else event.failure
        again = event.attempt > known.attempt
        reward = event.grade.reward if event.grade is not None else None if again else known.reward
        kept = failure if event.stage is Stage.FINISHED else failure or known.failure
        self.sessions[event.session_id] = Seen(event.stage, event.attempt, now_s, reward, kept)
        if failure is None or not (again or event.stage is Stage.FINISHED):
            return None
        return self._line(self._samples[event.session_id], failure, event.attempt, again)

    def _line(self, sample: int, failure: Failure, attempt: int, again: bool) -> str | None:
        told = f"{failure.kind}: {failure.message}"
        self._told[failure.kind, failure.message] += 1
        times = self._told[failure.kind, failure.message]
        if times > SAME_FAILURE:
            return None
        then = f", attempt {attempt} follows" if again else ""
        more = "; more of this kind are only counted" if times == SAME_FAILURE else ""
        return visible(f"sample {sample}{then}: {told}{more}")

    def counts(self) -> Counter[str]:
        """Sessions by step (`NAMES`)."""
        return Counter(STEPS[one.stage] for one in self.sessions.values())

    def failed(self) -> int:
        """Finished sessions with a failure."""
        return sum(one.stage is Stage.FINISHED and one.failure is not None for one in self.sessions.values())

    def retries(self) -> int:
        """Attempts beyond each session's first."""
        return sum(one.attempt - 1 for one in self.sessions.values())

    def summary(self, now_s: float) -> str:
        """One line: time, sessions by step, failures, retries, mean reward."""
        counts = self.counts()
        told = [f"{counts[name]} {name}" for name in NAMES if counts[name]]
        told += [
            f"{number} {name}" for number, name in ((self.failed(), "failed"), (self.retries(), "retried")) if number
        ]
        rewards = [one.reward for one in self.sessions.values() if one.reward is not None]
        if rewards:
            told.append(f"mean reward {sum(rewards) / len(rewards):.2f}")
        return f"{duration(now_s - self.started_s):>6}  {', '.join(told)}"

    def view(self, now_s: float, height: int) -> Group:
        """The summary and, where `height` lines hold them, a row per session."""
        head = Text(self.summary(now_s), "bold")
        if len(self.sessions) > height - ROWS_BESIDE:
            return Group(head)
        table = plain_table(("#", "right"), ("step", "left"), ("time", "right"), ("try", "right"), ("", "left"))
        table.columns[4].no_wrap, table.columns[4].overflow = True, "ellipsis"
        for sample, one in enumerate(self.sessions.values()):
            done = one.stage is Stage.FINISHED
            note = Text("" if one.reward is None else f"reward {one.reward:g}")
            if one.failure is not None:
                note = Text(visible(f"{one.failure.kind}: {one.failure.message}").replace("\n", " "))
                note.stylize("red" if done else "yellow")
            step = Text(STEPS[one.stage])
            if done:
                step = Text("failed", "red") if one.failure is not None else Text("finished", "green")
            spent = "" if done else duration(now_s - one.since_s)
            table.add_row(str(sample), step, spent, str(one.attempt) if one.attempt > 1 else "", note)
        return Group(head, table)


async def follow(client: PolarClient, task: Followed, out: Console) -> TaskResult:
    """Show the task's progress until it has ended."""
    clock = client.clock
    progress = Progress(task, clock.monotonic())
    result: TaskResult | None = None
    with _shown(out, progress, clock.monotonic) as (show, tell):
        ticking = asyncio.create_task(_tick(show, clock))
        try:
            async with aclosing(client.stages(task.task_id, since_ms=task.since_ms)) as events:
                async for event in events:
                    if isinstance(event, TaskResult):
                        result = event
                    elif line := progress.apply(event, clock.monotonic()):
                        tell(line)
        finally:
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
        show()
    assert result is not None
    return result


@contextmanager
def _shown(
    out: Console, progress: Progress, now: Callable[[], float]
) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """How progress is shown, and how a line is told beside it."""

    def tell(line: str) -> None:
        out.print(Text(line, "yellow"), soft_wrap=True)

    if out.is_terminal:
        with Live(console=out, auto_refresh=False) as live:
            yield lambda: live.update(progress.view(now(), out.height), refresh=True), tell
        return
    last, due, wait = "", 0.0, CALM_S

    def show() -> None:
        nonlocal last, due, wait
        counts = repr(sorted(progress.counts().items()))
        ended = progress.counts()["finished"] == len(progress.sessions)
        if counts == last or (now() < due and not ended):
            return
        out.print(progress.summary(now()), markup=False, soft_wrap=True)
        last, due, wait = counts, now() + wait, min(2 * wait, 60.0)

    yield show, tell


async def _tick(show: Callable[[], None], clock: Clock) -> None:
    while True:
        show()
        await clock.sleep(REFRESH_S)


async def finished(client: PolarClient, task: Followed) -> tuple[list[Trajectory], list[GroupClosed]]:
    """The ended task's trajectories by sample, and its closed groups."""
    trajectories: dict[str, Trajectory] = {}
    groups: dict[str, GroupClosed] = {}
    events = client.trajectories(task_ids={task.task_id}, start=task.since_ms)
    try:
        async with asyncio.timeout(LATE_S) as deadline, aclosing(events):
            async for event in events:
                if isinstance(event, Trajectory):
                    trajectories[event.session_id] = event
                else:
                    groups[event.group_id] = event
                if len(trajectories) == len(task.sessions):
                    if {one.group_id for one in trajectories.values()} <= set(groups):
                        break
                    # a group may have other tasks, and then is not closed by this one's end
                    deadline.reschedule(min(deadline.when() or 0.0, asyncio.get_running_loop().time() + 1.0))
    except TimeoutError:
        pass  # what has come is what there is
    return sorted(trajectories.values(), key=lambda one: one.sample), list(groups.values())
