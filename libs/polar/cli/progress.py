"""A bar on standard error while a command reads much of the log; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .output import complain


class Bar:
    """Callable as `bar(what, done, total)`; what is new gets a bar of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` records; going back starts over (the next partition)."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)


@contextmanager
def bar() -> Iterator[Bar]:
    """Shows bars until the end of the block, and leaves none behind."""
    speaker = complain()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=speaker,
        transient=True,
        disable=not speaker.is_terminal,
    ) as progress:
        yield Bar(progress)
