"""A log with finished tasks on it, made by the real builder and finisher, for commands that work on the log."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from polar.builder.service import BuilderService
from polar.builder.settings import BuilderSettings
from polar.bus import Bus, BusSettings, Out, Record
from polar.evaluator import EvaluatorSettings, FinisherService
from polar.schemas import (
    EvaluatorSpec,
    Grade,
    GroupClosed,
    GroupMember,
    Outcome,
    RecordRef,
    SessionGraded,
    Status,
    Trajectory,
)
from polar.schemas.topics import Service
from polar.service.clock import Clock
from tests.builder.replaying import committed, mixed, of_task, write
from tests.builder.toy import Session
from tests.cli.conftest import Polar

PATIENCE_S = 60.0
COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)


async def run(polar: Polar, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command to its end, without blocking the loop."""
    return await asyncio.to_thread(polar, *arguments, **more)


def clean(folder: Path) -> list[Path]:
    """Scratch files that a command left behind."""
    return list(folder.rglob("*.sqlite"))


class World:
    """Writes what the services would, at the test's topics."""

    def __init__(self, settings: BusSettings, folder: Path, clock: Clock | None = None) -> None:
        self.settings = settings
        self._folder = folder
        self._clock = clock
        self.proxy = Bus(settings, Service.PROXY, clock=clock)
        self.scheduler = Bus(settings, Service.SCHEDULER, clock=clock)

    async def build(self, tasks: dict[str, list[Session]], group: str | None = None) -> None:
        """The sessions of tasks onto `completions`, and what the builder makes of them onto `built`."""
        before = len(await committed(self.proxy, "built"))
        sessions = [one for ones in tasks.values() for one in ones]
        told = {
            one.session_id: (task, len(ones), sample) for task, ones in tasks.items() for sample, one in enumerate(ones)
        }
        entries = []
        for entry in mixed(sessions):
            task, count, sample = told[entry.event.session_id]  # type: ignore[attr-defined]
            entries += of_task([entry], task, group, num_samples=count, sample=sample)
        await write(self.proxy, entries)
        async with Bus(self.settings, Service.BUILDER, clock=self._clock) as bus:
            service = BuilderService(bus, BuilderSettings(), state_dir=self._folder)
            async with _running(service):
                await self.until("built", before + len(sessions))

    async def finish(self, rewards: dict[str, float | None]) -> None:
        """Grades of built sessions, and what the finisher makes of them."""
        before = len(await committed(self.proxy, "trajectories"))
        places = {one.key: one for one in await committed(self.proxy, "built")}
        graded = [_graded(places[name], reward) for name, reward in rewards.items()]
        await self.scheduler.send(*(Out("graded", one.session_id, one) for one in graded))
        await self._finish("trajectories", before + len(rewards))

    async def revise(self, session: str, reward: float, revision: int = 1) -> None:
        """A later grade."""
        before = len(await committed(self.proxy, "rewards"))
        (built,) = [one for one in await committed(self.proxy, "built") if one.key == session]
        await self.scheduler.send(
            Out("graded", session, _graded(built, reward, revision=revision, run="again", evaluator_version="2"))
        )
        await self._finish("rewards", before + 1)

    async def close(self, group: str) -> None:
        """The group is decided: it has what has been published of it."""
        found = [one.value for one in await committed(self.proxy, "trajectories")]
        members = [one for one in found if isinstance(one, Trajectory) and one.group_id == group]
        event = GroupClosed(
            group_id=group,
            tasks=sorted({one.task_id for one in members}),
            size=len(members),
            members=[
                GroupMember(
                    session_id=one.session_id,
                    task_id=one.task_id,
                    attempt=one.attempt,
                    outcome=one.outcome,
                    reward=one.reward,
                )
                for one in members
            ],
            selection=[one.session_id for one in members if one.reward is not None],
            reason="complete",
            at_ms=1,
        )
        await self.scheduler.send(Out("trajectories", group, event))

    async def _finish(self, topic: str, count: int) -> None:
        async with (
            Bus(self.settings, Service.FINISHER, clock=self._clock) as bus,
            _running(FinisherService(bus, EvaluatorSettings())),
        ):
            await self.until(topic, count)

    async def until(self, topic: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(await committed(self.proxy, topic)) < count:  # noqa: ASYNC110 - it happens at the broker
                await asyncio.sleep(0.1)

    async def records(self, name: str) -> list[Record]:
        """A topic by its full name, as trajectories."""
        plain = self.settings.model_copy(update={"topic_prefix": name.removesuffix("trajectories")})
        async with Bus(plain, Service.USER) as bus:
            return await committed(bus, "trajectories")


@asynccontextmanager
async def world(settings: BusSettings, folder: Path, clock: Clock | None = None) -> AsyncIterator[World]:
    made = World(settings, folder, clock)
    async with made.proxy, made.scheduler:
        await made.proxy.prepare()
        yield made


@asynccontextmanager
async def _running(service: BuilderService | FinisherService) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _graded(built: Record, reward: float | None, **more: object) -> SessionGraded:
    trajectory = built.value
    assert isinstance(trajectory, Trajectory)
    fields: dict[str, object] = {
        "session_id": trajectory.session_id,
        "attempt": trajectory.attempt,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "outcome": trajectory.outcome,
        "built": RecordRef(topic="built", partition=built.partition, offset=built.offset),
        "grade": None if reward is None else Grade(reward=reward, rewards={"r": reward}, report={"said": reward}),
        "evaluator": EvaluatorSpec(strategy="command"),
        "evaluator_version": "1",
        "timing_ms": {"run_ms": 7.5, "grade_ms": 2.0},
        "at_ms": 1,
    }
    return SessionGraded(**(fields | more))  # type: ignore[arg-type]


def closed(session: Session) -> Session:
    """A session that has ended."""
    session.close()
    session.final()
    return session


def ids(records: Iterable[Record]) -> list[str]:
    """Trajectories' sessions and groups' ids, in order."""
    found = []
    for one in records:
        found.append(one.value.session_id if isinstance(one.value, Trajectory) else f"group {one.key}")
    return found
