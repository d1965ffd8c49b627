"""A box that is a folder: files, and commands that are each started anew over it.

What is the same for the sandboxed and the plain local backend. Each command is run by a task of its own that nobody
cancels; whoever gives up (a timeout, a cancelled caller, `kill_all`) sets its `stop`, and the task ends the processes
before it ends itself. So no path leads out of `exec` while something still runs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from polar.runtime.errors import BoxGone, BoxStartFailed, PathRefused, RuntimeFailure, SpecRefused
from polar.runtime.interface import (
    DEFAULT_DOWNLOAD_LIMIT,
    DEFAULT_LOG_LIMIT,
    DEFAULT_OUTPUT_LIMIT,
    DEFAULT_READ_LIMIT,
    BoxSpec,
    Download,
    ExecOutcome,
    Network,
)
from polar.runtime.local import files
from polar.runtime.local.capture import Capture, Log
from polar.runtime.local.cgroups import LimitGroups
from polar.runtime.local.procs import kill_until_none, marked
from polar.runtime.local.store import BoxFolder, BoxRecord, BoxStore
from polar.runtime.local.waiting import until_done

T = TypeVar("T")

DRAIN_GRACE = 5.0  # seconds for reading what dead processes have left in their pipes


class CommandProcess(Protocol):
    """A started command that waits for its `release` (see `sandbox.py`)."""

    @property
    def process(self) -> asyncio.subprocess.Process: ...
    async def prepare(self) -> None: ...
    async def release(self) -> None: ...
    async def feed(self, data: bytes) -> None: ...
    async def wait(self) -> None: ...
    async def end(self) -> int | None: ...
    @property
    def door_lost(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command as asked for."""

    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    network: Network
    timeout: float | None
    stdin: bytes
    output_limit: int
    log_file: Path | None
    log_limit: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class FolderBox(ABC):
    """See the module. Backends say where paths lie and how a command is started."""

    def __init__(self, store: BoxStore, record: BoxRecord) -> None:
        self._store = store
        self._record = record
        self._folder: BoxFolder = store.folder(record.spec.box_id)
        self._running: dict[asyncio.Task[ExecOutcome], Job] = {}
        self._copying: set[asyncio.Task[Any]] = set()
        self._gone = False

    @property
    def box_id(self) -> str:
        return self._record.spec.box_id

    @property
    def spec(self) -> BoxSpec:
        return self._record.spec

    @property
    @abstractmethod
    def _shell(self) -> str:
        """The shell that runs a command given as text."""

    @property
    @abstractmethod
    def door_url(self) -> str | None: ...

    @property
    @abstractmethod
    def session_dir(self) -> str: ...

    @abstractmethod
    def _locate(self, path: str, *, create: bool) -> tuple[Path, tuple[str, ...]]:
        """The host folder that a box path lies in, and the components below it. Raises PathRefused. Blocks."""

    @abstractmethod
    async def _start(self, job: Job) -> CommandProcess:
        """Start a command that waits. Raises BoxStartFailed, RuntimeUnavailable."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """The variables that commands see before the box's and the call's own."""

    async def _limit_groups(self) -> LimitGroups | None:
        return None

    # Commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
        network: Literal["none"] | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        log_file: Path | None = None,
        log_limit: int = DEFAULT_LOG_LIMIT,
    ) -> ExecOutcome:
        if cwd is not None and not cwd.startswith("/"):
            raise SpecRefused(f"cwd {cwd!r} is not absolute")
        words = (self._shell, "-c", command) if isinstance(command, str) else tuple(command)
        variables = {**self._environment(), **self.spec.env, **(env or {})}
        _check_words(words, variables)
        job = Job(
            command=words,
            cwd=cwd or self.spec.workdir or f"{self.session_dir}/workspace",
            env=variables,
            network=network or self.spec.network,
            timeout=timeout,
            stdin=stdin or b"",
            output_limit=output_limit,
            log_file=log_file,
            log_limit=log_limit,
        )
        await self._check_here()
        task = asyncio.create_task(self._run(job))
        self._running[task] = job
        task.add_done_callback(lambda done: self._running.pop(done, None))
        try:
            return await asyncio.shield(task)
        finally:
            job.stop.set()
            await until_done(task)

    async def _run(self, job: Job) -> ExecOutcome:
        log = await self._open_log(job)
        try:
            return await self._run_logged(job, log)
        finally:
            if log is not None:
                await log.close()

    async def _run_logged(self, job: Job, log: Log | None) -> ExecOutcome:
        loop = asyncio.get_running_loop()
        groups = await self._limit_groups()
        kills_before = await asyncio.to_thread(groups.oom_kills) if groups else 0
        running = await self._start(job)
        capture = Capture(running.process, job.output_limit, log)
        feeder: asyncio.Task[None] | None = None
        how: Literal["exit", "timeout", "stop"] = "stop"
        code: int | None = None
        began = loop.time()
        failure: RuntimeFailure | None = None
        try:
            await running.prepare()
            if not (job.stop.is_set() or self._gone):
                began = loop.time()
                await running.release()
                feeder = asyncio.create_task(running.feed(job.stdin))
                how = await _race(running, job)
        except BoxStartFailed as error:
            failure = error
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            code = await running.end()
            ended = loop.time()
            if await capture.finish(DRAIN_GRACE):
                await running.process.wait()  # at once; asyncio's own books on the process are closed with it
        if code is None and (running.process.returncode or 0) < 0:
            how = "timeout" if how == "timeout" else "stop"  # the launcher was shot: by another handle's kill_all
        oom = groups is not None and await asyncio.to_thread(groups.oom_kills) > kills_before
        if how == "exit" and code is None and not oom:
            failure = BoxStartFailed("the command was not started")
        if failure is not None:
            raise self._explained(failure, capture.stderr.value())
        return ExecOutcome(
            return_code=None if how != "exit" else 137 if code is None else code,
            stdout=capture.stdout.value(),
            stderr=capture.stderr.value(),
            timed_out=how == "timeout",
            truncated=capture.truncated,
            log_truncated=log is not None and log.truncated,
            duration_s=ended - began,
            oom_killed=oom,
            door_lost=running.door_lost,
        )

    def _explained(self, failure: RuntimeFailure, stderr: bytes) -> RuntimeFailure:
        """The failure with what the launcher said last; BoxGone where the box was deleted meanwhile."""
        if self._gone:
            return BoxGone(f"box {self.box_id} was destroyed")
        said = " | ".join(stderr.decode("utf-8", "replace").strip().splitlines()[-3:])
        return BoxStartFailed(f"{failure.message}: {said}" if said else failure.message, hint=failure.hint)

    async def _open_log(self, job: Job) -> Log | None:
        if job.log_file is None:
            return None
        session, path = self._folder.session, job.log_file
        if path.is_relative_to(session):  # the box's commands write there too: no link of theirs is followed
            root, parts = session, path.relative_to(session).parts
        else:
            root, parts = path.parent, (path.name,)
        if ".." in path.parts or not path.is_absolute():
            raise PathRefused(f"log file {path} is not an absolute path without '..'")

        def open_log() -> int:
            root.mkdir(parents=True, exist_ok=True)
            return files.open_log(root, parts)

        return Log(await asyncio.to_thread(open_log), job.log_limit)

    async def _check_here(self) -> None:
        if self._gone or not await asyncio.to_thread(self._folder.exists):
            raise BoxGone(f"box {self.box_id} does not exist any more")

    async def kill_all(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            self._running[task].stop.set()
        for task in tasks:
            await until_done(task)
        await self._kill_strays()

    def _find_processes(self) -> Iterable[int]:
        """Ids of all processes that belong to the box. Blocks."""
        return marked(self.box_id)

    async def _kill_strays(self) -> None:
        """Kill what other node processes have left; with nothing left this is one look at /proc."""
        left = await asyncio.to_thread(kill_until_none, self._find_processes)
        if left:
            raise BoxStartFailed(f"processes of box {self.box_id} cannot be killed: {left}")

    # Files

    async def upload(self, source: Path, target: str) -> None:
        await self._in_thread(lambda: files.copy_in(source, *self._locate(target, create=True)))

    async def download(self, source: str, target: Path, max_bytes: int = DEFAULT_DOWNLOAD_LIMIT) -> Download:
        return await self._in_thread(lambda: files.copy_out(*self._locate(source, create=False), target, max_bytes))

    async def read_file(self, path: str, max_bytes: int = DEFAULT_READ_LIMIT) -> bytes:
        return await self._in_thread(lambda: files.read_file(*self._locate(path, create=False), max_bytes))

    async def write_file(self, path: str, data: bytes) -> None:
        await self._in_thread(lambda: files.write_file(*self._locate(path, create=True), data))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run file work in a thread; returns, also when cancelled, only after it has ended."""
        await self._check_here()
        task = asyncio.create_task(asyncio.to_thread(work))
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)
        try:
            return await asyncio.shield(task)
        finally:
            await until_done(task)

    async def destroy(self) -> None:
        self._gone = True
        await self.kill_all()
        for task in list(self._copying):
            await until_done(task)
        await self._clean_up()
        await asyncio.to_thread(self._store.remove, self.box_id)

    async def _clean_up(self) -> None:  # noqa: B027 - a backend with nothing outside the folder has nothing to do
        """Give back what a dead box still holds outside its folder."""


async def _race(running: CommandProcess, job: Job) -> Literal["exit", "timeout", "stop"]:
    """What comes first: the command's own end, its timeout, or somebody's wish to stop it."""
    exited = asyncio.create_task(running.wait())
    stopped = asyncio.create_task(job.stop.wait())
    try:
        await asyncio.wait({exited, stopped}, timeout=job.timeout, return_when=asyncio.FIRST_COMPLETED)
        return "exit" if exited.done() else "stop" if stopped.done() else "timeout"
    finally:
        for task in (exited, stopped):
            task.cancel()
        await asyncio.gather(exited, stopped, return_exceptions=True)


def _check_words(words: Sequence[str], variables: Mapping[str, str]) -> None:
    if not words:
        raise SpecRefused("the command is empty")
    if any("\0" in word for word in words):
        raise SpecRefused("a word of the command holds a NUL byte")
    for key, value in variables.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise SpecRefused(f"{key!r} is no name, or its value no text, of an environment variable")
