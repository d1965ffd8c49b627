"""Several tasks at once, while one waits: a live table of stages on a terminal, a calm line now and then elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar.client import PolarClient
from polar.schemas import GroupClosed, TaskAccepted, TaskResult, Trajectory

from .. import live
from ..output import duration, plain_table

REFRESH_S = 0.25
CALM_S = 5.0


@dataclass(frozen=True)
class Ended:
    """A task with what came of it. `after_s`: since the watch began."""

    name: str
    trajectories: list[Trajectory]
    groups: list[GroupClosed]
    after_s: float


class Watch:
    """The progress of the tasks, by name."""

    def __init__(self, client: PolarClient, out: Console) -> None:
        self._client = client
        self._out = out
        self._now = client.clock.monotonic
        self._began = self._now()
        self._tasks: dict[str, live.Progress] = {}
        self.first_capture_s: float | None = None

    async def follow(self, accepted: dict[str, TaskAccepted], ended: Callable[[Ended], None]) -> list[Ended]:
        """Show the tasks' progress until all have ended; `ended` hears of each as it does."""
        followed = {name: await live.followed(self._client, one) for name, one in accepted.items()}
        self._tasks = {name: live.Progress(one, self._began) for name, one in followed.items()}
        async with AsyncExitStack() as stack:
            show = self._shown(stack)
            ticking = asyncio.create_task(self._tick(show))
            try:
                async with asyncio.TaskGroup() as group:
                    waits = [group.create_task(self._one(name, one, ended)) for name, one in followed.items()]
            finally:
                ticking.cancel()
                with suppress(asyncio.CancelledError):
                    await ticking
            show()
        return [one.result() for one in waits]

    def elapsed_s(self) -> float:
        return self._now() - self._began

    async def _one(self, name: str, task: live.Followed, ended: Callable[[Ended], None]) -> Ended:
        progress = self._tasks[name]
        async with aclosing(self._client.stages(task.task_id, since_ms=task.since_ms)) as events:
            async for event in events:
                if isinstance(event, TaskResult):
                    break
                if line := progress.apply(event, self._now()):
                    self._out.print(f"{name}: {line}", style="yellow", markup=False, soft_wrap=True)
        trajectories, groups = await live.finished(self._client, task)
        found = Ended(name, trajectories, groups, self.elapsed_s())
        ended(found)
        return found

    def _shown(self, stack: AsyncExitStack) -> Callable[[], None]:
        if self._out.is_terminal:
            shown = stack.enter_context(Live(console=self._out, auto_refresh=False))
            return lambda: shown.update(self._table(), refresh=True)
        last, due = "", 0.0

        def show() -> None:
            nonlocal last, due
            told = "; ".join(f"{name}: {_steps(one)}" for name, one in self._tasks.items())
            if told != last and self._now() >= due:
                self._out.print(f"{duration(self.elapsed_s()):>5}  {told}", markup=False, soft_wrap=True)
                last, due = told, self._now() + CALM_S

        return show

    def _table(self) -> Table:
        table = plain_table(("task", "left"), *((name, "right") for name in live.NAMES), ("rewards", "left"), gap=1)
        for name, progress in self._tasks.items():
            counts = progress.counts()
            row = [
                Text(str(counts[step]) if counts[step] else "·", "" if counts[step] else "dim") for step in live.NAMES
            ]
            table.add_row(name, *row, _rewards(progress))
        table.caption = duration(self.elapsed_s())
        table.caption_justify = "left"
        return table

    async def _tick(self, show: Callable[[], None]) -> None:
        while True:
            show()
            await self._client.clock.sleep(REFRESH_S)


def _steps(progress: live.Progress) -> str:
    counts = progress.counts()
    return ", ".join(f"{counts[name]} {name}" for name in live.NAMES if counts[name])


def _rewards(progress: live.Progress) -> Text:
    told = Text()
    for one in progress.sessions.values():
        if one.reward is None:
            told.append("·", "dim")
        else:
            told.append(f"{one.reward:g}", "bold green" if one.reward else "red")
    return told
