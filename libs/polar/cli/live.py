"""A task's progress while one waits: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.live import Live
from rich.table import Table

from polar.client import PolarClient, group_advantages
from polar.schemas import GroupClosed, SessionResult, Stage, StageChanged, TaskAccepted, TaskResult, Trajectory

SHOWN = (
    Stage.REGISTERED,
    Stage.INITIALIZING,
    Stage.READY,
    Stage.RUNNING,
    Stage.ENDED,
    Stage.CLOSED,
    Stage.BUILT,
    Stage.EVALUATING,
    Stage.GRADED,
    Stage.FINISHED,
)
SILENT_S = 5.0
"""After so long without a node, say that none is there."""


class Progress:
    """What is known of a task's sessions; pure."""

    def __init__(self, accepted: TaskAccepted) -> None:
        self.accepted = accepted
        self.stages: dict[str, StageChanged | None] = dict.fromkeys(accepted.sessions)

    def apply(self, event: StageChanged) -> None:
        if event.session_id in self.stages:
            self.stages[event.session_id] = event

    def counts(self) -> Counter[Stage]:
        return Counter(event.stage if event else Stage.REGISTERED for event in self.stages.values())

    def table(self) -> Table:
        counts = self.counts()
        table = Table(title=f"task {self.accepted.task_id}: {self.accepted.count} sessions", title_justify="left")
        for stage in SHOWN:
            table.add_column(stage.lower(), justify="right")
        table.add_row(*(str(counts[stage]) if counts[stage] else "·" for stage in SHOWN))
        return table


async def follow(client: PolarClient, accepted: TaskAccepted, out: Console) -> TaskResult:
    """Show the task's progress until it has ended."""
    progress = Progress(accepted)
    # a moment earlier: reports may carry the clock of another machine
    since = accepted.at_ms - 60_000
    if not await client.nodes():
        out.print("[yellow]no node is alive yet: the sessions wait in the queue (start one with `polar serve all`)[/]")
    result: TaskResult | None = None
    if out.is_terminal:
        with Live(progress.table(), console=out, refresh_per_second=8) as live:
            async for event in client.stages(accepted.task_id, since_ms=since):
                if isinstance(event, TaskResult):
                    result = event
                else:
                    progress.apply(event)
                    live.update(progress.table())
    else:
        async for event in client.stages(accepted.task_id, since_ms=since):
            if isinstance(event, TaskResult):
                result = event
            else:
                progress.apply(event)
                if event.stage in (Stage.RUNNING, Stage.FINISHED) or event.failure is not None:
                    reason = f": {event.failure.message}" if event.failure else ""
                    out.print(f"{event.session_id} {event.stage.lower()}{reason}", markup=False, soft_wrap=True)
    assert result is not None
    return result


async def finished(client: PolarClient, accepted: TaskAccepted) -> tuple[list[Trajectory], list[GroupClosed]]:
    """The ended task's trajectories by sample, and its closed groups."""
    trajectories: dict[str, Trajectory] = {}
    groups: list[GroupClosed] = []
    since = accepted.at_ms - 60_000
    async for event in client.trajectories(task_ids={accepted.task_id}, start=since, follow=False):
        if isinstance(event, Trajectory):
            trajectories[event.session_id] = event
        else:
            groups.append(event)
    return sorted(trajectories.values(), key=lambda one: one.sample), groups


def report(out: Console, trajectories: list[Trajectory]) -> None:
    """A table of a group: rewards, advantages and what there is to train on."""
    table = Table(title="rewards and advantages", title_justify="left")
    for name, side in (
        ("sample", "right"),
        ("session", "left"),
        ("status", "left"),
        ("reward", "right"),
        ("advantage", "right"),
        ("calls", "right"),
        ("traces", "right"),
        ("trained tokens", "right"),
        ("agent s", "right"),
    ):
        table.add_column(name, justify=side, no_wrap=name == "session")  # type: ignore[arg-type]
    advantages = group_advantages([one.reward for one in trajectories])
    for one, advantage in zip(trajectories, advantages, strict=True):
        trained = sum(int(one.view(trace).loss_mask.sum()) for trace in one.traces)
        status = str(one.outcome.status)
        if one.outcome.failure is not None:
            status += f" ({one.outcome.failure.kind})"
        run = one.timing_ms.get("run")
        table.add_row(
            str(one.sample),
            one.session_id,
            status,
            "–" if one.reward is None else f"{one.reward:g}",
            "–" if advantage is None else f"{advantage:+.2f}",
            str(one.captured),
            str(len(one.traces)),
            str(trained),
            "–" if run is None else f"{run / 1000:.1f}",
        )
    out.print(table)


def failures(out: Console, results: list[SessionResult] | list[Trajectory]) -> None:
    """Each kind of failure once, with the harness's last output."""
    seen: set[str] = set()
    for one in results:
        failure = one.outcome.failure
        if failure is None or failure.kind in seen:
            continue
        seen.add(failure.kind)
        out.print(f"[red]{failure.kind}[/] ", end="")
        out.print(f"in {one.session_id}: {failure.message}", markup=False, soft_wrap=True)
        tail = (failure.detail or {}).get("output_tail")
        if tail:
            for line in str(tail).splitlines()[-8:]:
                out.print(f"  | {line}", style="dim", markup=False, soft_wrap=True)
