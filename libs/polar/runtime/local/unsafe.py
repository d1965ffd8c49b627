"""Plain processes as boxes, for machines that forbid user namespaces. No boundary against a hostile agent.

A command runs as the node's user, sees the whole machine and network, and is only kept in order: its folder, limits
of each single process, and a supervisor (`supervisor.py`) that ends every descendant with it. An operator has to
allow it by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polar.runtime.errors import BoxStartFailed, PathRefused, RuntimeFailure, RuntimeUnavailable, SpecRefused
from polar.runtime.interface import BoxInfo, BoxSpec, Capabilities, Door, Probe
from polar.runtime.local.box import CommandProcess, FolderBox, Job
from polar.runtime.local.bubblewrap import HOME, SESSION_DIR
from polar.runtime.local.files import make_dir, split
from polar.runtime.local.procs import EXEC_MARK, MARK, kill_until_none, marked
from polar.runtime.local.settings import LocalSettings
from polar.runtime.local.store import BoxRecord, BoxStore, check_spec
from polar.runtime.local.waiting import Held, read_until, write_all

SUPERVISOR = Path(__file__).with_name("supervisor.py")
KILL_PATIENCE = 10.0  # seconds for the supervisor to kill and reap; milliseconds are usual
PROBE_TIMEOUT = 20.0
WEAKER = (
    "weaker than a sandbox: commands run as the node's user and see its files and its network; memory, processes and "
    "file sizes are limited for each process only"
)


class UnsafeLocalRuntime:
    """Runtime of plain processes; made only where `allow_unsafe_local` is set."""

    name = "local-unsafe"
    capabilities = Capabilities(survives_restart=True, kills_detached=True, host_network=True, shared_loopback=True)

    def __init__(self, settings: LocalSettings) -> None:
        if not settings.allow_unsafe_local:
            raise SpecRefused("local-unsafe runs agents without a sandbox", hint="allow_unsafe_local must be set")
        self._settings = settings
        self._store = BoxStore(settings.root, self.name)

    @classmethod
    def configure(cls, settings: Mapping[str, Any]) -> UnsafeLocalRuntime:
        return cls(LocalSettings.parse(settings))

    async def probe(self) -> Probe:
        try:
            box = await self.create(BoxSpec(box_id=str(uuid.uuid4()), labels={"polar": "probe"}))
            try:
                outcome = await box.exec("echo polar", timeout=PROBE_TIMEOUT)
            finally:
                await box.destroy()
        except (RuntimeFailure, OSError) as error:
            return Probe(False, str(error), "", Capabilities())
        if outcome.stdout != b"polar\n":
            return Probe(False, f"a trial command said {outcome.stderr_text.strip()!r}", "", Capabilities())
        return Probe(True, WEAKER, "prefer the runtime 'local'", self.capabilities)

    async def create(self, spec: BoxSpec, door: Door | None = None) -> UnsafeLocalBox:
        check_spec(spec)
        if not hasattr(os, "pidfd_open"):
            raise RuntimeUnavailable("this system has no pidfd", hint="Linux 5.3 or newer is needed")
        if spec.kwargs:
            raise SpecRefused("the runtime local-unsafe has no options")
        record = BoxRecord(
            backend=self.name,
            spec=replace(spec, env=dict(spec.env), labels=dict(spec.labels), kwargs={}),
            door=door.host_address if door else None,
            created=time.time(),
        )
        box = self._box(record)
        try:
            workdir = box.host_path(spec.workdir) if spec.workdir else None
        except PathRefused as error:
            raise SpecRefused(f"workdir: {error.message}") from error
        await asyncio.to_thread(self._store.create, record)
        if workdir is not None:
            try:
                await asyncio.to_thread(make_dir, *workdir)
            except RuntimeFailure:
                await box.destroy()
                raise
        return box

    def _box(self, record: BoxRecord) -> UnsafeLocalBox:
        return UnsafeLocalBox(self._store, record, self._settings)

    async def attach(self, box_id: str, door: Door | None = None) -> UnsafeLocalBox | None:
        record = await asyncio.to_thread(self._store.load, box_id)
        if record is None:
            return None
        if door is not None and door.host_address != record.door:
            record = replace(record, door=door.host_address)
            await asyncio.to_thread(self._store.save, record)
        return self._box(record)

    async def boxes(self, **labels: str) -> list[BoxInfo]:
        return await asyncio.to_thread(self._store.find, labels)


class UnsafeLocalBox(FolderBox):
    """A folder of the machine. Paths below /polar/session mean its session folder, in files and as cwd."""

    def __init__(self, store: BoxStore, record: BoxRecord, settings: LocalSettings) -> None:
        super().__init__(store, record)
        self._settings = settings

    @property
    def _shell(self) -> str:
        return "bash"

    @property
    def session_dir(self) -> str:
        return str(self._folder.session)

    @property
    def door_url(self) -> str | None:
        if self._record.door is None or self.spec.network == "none":
            return None
        host, port = self._record.door
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": self._settings.search_path,
            "HOME": str(self._folder.home),
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self._folder.tmp),
        }

    def host_path(self, path: str) -> tuple[Path, tuple[str, ...]]:
        """The box's folder that a path lies in, and the components below it. Raises PathRefused."""
        parts = split(path)
        for alias, folder in ((SESSION_DIR, self._folder.session), (HOME, self._folder.home)):
            for prefix in (split(alias), folder.parts[1:]):
                if parts[: len(prefix)] == prefix:
                    return folder, parts[len(prefix) :]
        raise PathRefused(f"{path!r} is not in the box's session folder or home")

    def _locate(self, path: str, *, create: bool) -> tuple[Path, tuple[str, ...]]:
        return self.host_path(path)

    def _rlimits(self) -> list[tuple[int, int]]:
        spec, settings = self.spec, self._settings
        memory = spec.memory_mb if spec.memory_mb is not None else settings.default_memory_mb
        limits = [(resource.RLIMIT_CORE, 0)]
        if memory is not None:
            limits.append((resource.RLIMIT_DATA, memory << 20))
        if spec.storage_mb is not None:
            limits.append((resource.RLIMIT_FSIZE, spec.storage_mb << 20))
        return limits

    async def _start(self, job: Job) -> CommandProcess:
        cwd = job.cwd
        with contextlib.suppress(PathRefused):
            folder, parts = self.host_path(cwd)
            cwd = str(folder.joinpath(*parts))
        mark = str(uuid.uuid4())
        plan = {
            "command": job.command,
            "cwd": cwd,
            "env": {**job.env, MARK: self.box_id, EXEC_MARK: mark},
            "rlimits": self._rlimits(),
        }
        return await SupervisedProcess.start(self.box_id, mark, json.dumps(plan).encode())


class SupervisedProcess:
    """One supervisor and its command. The command starts with `release`; closing the control handle kills it."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, control: int, status: int, stdin: int) -> None:
        self.process = process
        self._mark = mark
        self._control, self._status, self._stdin = control, status, stdin
        self._supervisor = Held(process.pid)
        self._open = {control, status, stdin}

    @classmethod
    async def start(cls, box_id: str, mark: str, plan: bytes) -> SupervisedProcess:
        """Start a supervisor, which waits. Raises BoxStartFailed."""
        control_theirs, control = os.pipe2(os.O_CLOEXEC)
        status, status_theirs = os.pipe2(os.O_CLOEXEC)
        stdin_theirs, stdin = os.pipe2(os.O_CLOEXEC)
        handle = os.memfd_create("polar-plan")

        def write_plan() -> None:
            os.write(handle, plan)
            os.lseek(handle, 0, os.SEEK_SET)

        theirs = (handle, control_theirs, status_theirs)
        try:
            await asyncio.to_thread(write_plan)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SUPERVISOR), *map(str, theirs)),
                pass_fds=theirs,
                env={MARK: box_id, EXEC_MARK: mark},
                stdin=stdin_theirs,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            for item in (control, status, stdin):
                os.close(item)
            raise BoxStartFailed(f"the supervisor did not start: {error}") from error
        finally:
            for item in (*theirs, stdin_theirs):
                os.close(item)
        for item in (control, status, stdin):
            os.set_blocking(item, False)
        return cls(process, mark, control, status, stdin)

    async def prepare(self) -> None:
        """Nothing: there is neither a network nor a group to make."""

    async def release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, b"!")

    async def feed(self, data: bytes) -> None:
        await write_all(self._stdin, data)
        self._close(self._stdin)

    def _close(self, handle: int) -> None:
        if handle in self._open:
            self._open.discard(handle)
            os.close(handle)

    async def wait(self) -> None:
        await self._supervisor.dead()

    @property
    def door_lost(self) -> int:
        """Always 0: there is no relay that could count."""
        return 0

    async def end(self) -> int | None:
        """Have everything killed, wait for it, close the handles; the exit code, None if the command was killed."""
        self._close(self._control)
        try:
            try:
                async with asyncio.timeout(KILL_PATIENCE):
                    await self._supervisor.dead()
            except TimeoutError:
                self._supervisor.kill()
                await self._supervisor.dead()
            status = await read_until(self._status, b"")
            if not status:  # the command was stopped, or the supervisor itself was shot: look for what it left
                await asyncio.to_thread(kill_until_none, lambda: marked(self._mark, EXEC_MARK))
            return int(json.loads(status)["exit-code"]) if status else None
        finally:
            self._supervisor.close()
            for handle in tuple(self._open):
                self._close(handle)
