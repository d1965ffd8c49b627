"""The local backend: boxes by bubblewrap, on any Linux machine that lets a user make namespaces, without images.

A box sees the machine's /usr and this Python read-only, its own session folder, home and /tmp, and of the network the
model proxy only. A running command never outlives its exec or the node process; files do. With a node that runs as
root, a box's processes are the machine's root without capabilities in a user namespace: prefer an ordinary user.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polar.runtime.errors import BoxStartFailed, PathRefused, RuntimeFailure, RuntimeUnavailable, SpecRefused
from polar.runtime.interface import BoxInfo, BoxSpec, Capabilities, Door, Probe
from polar.runtime.local import bubblewrap, cgroups
from polar.runtime.local.box import CommandProcess, FolderBox, Job
from polar.runtime.local.bubblewrap import HOME, SESSION_DIR, Features
from polar.runtime.local.cgroups import Controllers, LimitGroups, Limits
from polar.runtime.local.files import make_dir, split
from polar.runtime.local.procs import marked
from polar.runtime.local.sandbox import DoorPlan, SandboxPlan, SandboxProcess
from polar.runtime.local.settings import LocalSettings
from polar.runtime.local.store import NAME, BoxFolder, BoxRecord, BoxStore, check_spec

PROBE_LABELS = {"polar": "probe"}
PROBE_AGE = 600.0  # seconds after which a trial's box is left over
PROBE_TIMEOUT = 20.0  # seconds for the trial command; it takes 0.05
HINT = (
    "install bubblewrap (the system's package, or polar-rollout[gateway]), let users make namespaces "
    "(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container: "
    "seccomp and masked /proc must allow them), or set allow_unsafe_local for agents that you trust"
)


class LocalRuntime:
    """Runtime over bubblewrap."""

    name = "local"

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self._store = BoxStore(settings.root, self.name)
        self._features: Features | None = None
        self._probing = asyncio.Lock()
        self._controllers: Controllers | None = None
        self._shell = "/bin/sh"

    @classmethod
    def configure(cls, settings: Mapping[str, Any]) -> LocalRuntime:
        return cls(LocalSettings.parse(settings))

    @property
    def capabilities(self) -> Capabilities:
        controllers = self._controllers
        return Capabilities(
            isolated_filesystem=True,
            proxy_only_network=True,
            no_network=True,
            host_network=self._settings.allow_host_network,
            limits_memory=controllers is not None and controllers.limits("memory"),
            limits_pids=controllers is not None and controllers.limits("pids"),
            limits_cpus=controllers is not None and controllers.limits("cpu"),
            survives_restart=True,
            kills_detached=True,
        )

    async def probe(self) -> Probe:
        """Make a box, run a command in it behind a door, and see what it says."""
        self._controllers = await asyncio.to_thread(cgroups.detect, self._settings.cgroup_parent)
        if self._controllers is not None:
            await asyncio.to_thread(cgroups.sweep, self._controllers)
        self._shell = "/bin/bash" if await asyncio.to_thread(os.path.exists, "/bin/bash") else "/bin/sh"
        reasons = []
        for path in await asyncio.to_thread(bubblewrap.candidates, self._settings.bwrap):
            try:
                features = Features(path, await _version(path))
                await self._try(features)
            except (OSError, RuntimeFailure) as error:
                reasons.append(f"{path}: {error}")
                continue
            self._features = features
            weak = []
            if not self.capabilities.limits_memory:
                weak.append("no cgroup may be made here: memory is limited by process, processes by command")
            if os.geteuid() == 0:
                weak.append("the node runs as root: an ordinary user would keep boxes further from the machine")
            return Probe(True, "; ".join(weak), "", self.capabilities)
        self._features = None
        return Probe(False, "; ".join(reasons) or "no bwrap was found", HINT, Capabilities())

    async def _try(self, features: Features) -> None:
        for info in await asyncio.to_thread(self._store.find, PROBE_LABELS):
            if time.time() - info.created > PROBE_AGE and (
                record := await asyncio.to_thread(self._store.load, info.box_id)
            ):
                await self._box(features, record).destroy()  # of a node that was killed in its own probe
        door = Door(("127.0.0.1", 9))  # never reached: that the door can be made is what counts
        box = await self._make(features, BoxSpec(box_id=str(uuid.uuid4()), labels=PROBE_LABELS), door)
        try:
            outcome = await box.exec("echo polar", timeout=PROBE_TIMEOUT)
            if outcome.stdout != b"polar\n":
                raise BoxStartFailed(f"a trial command ended with {outcome.return_code}: {outcome.stderr_text.strip()}")
        finally:
            await box.destroy()

    async def _ready(self) -> Features:
        async with self._probing:
            if self._features is None:
                probe = await self.probe()
                if self._features is None:
                    raise RuntimeUnavailable(probe.reason, hint=probe.hint)
            return self._features

    async def create(self, spec: BoxSpec, door: Door | None = None) -> LocalBox:
        self._check(spec)
        return await self._make(await self._ready(), spec, door)

    def _check(self, spec: BoxSpec) -> None:
        check_spec(spec)
        if spec.network == "host" and not self._settings.allow_host_network:
            raise SpecRefused(
                "network 'host' is not allowed on this node", hint="use 'proxy-only', or set allow_host_network"
            )
        if unknown := sorted(set(spec.kwargs) - {"dirs"}):
            raise SpecRefused(f"unknown option {unknown[0]!r} of the local runtime", hint="known: dirs")
        _dirs(spec, bubblewrap.reserved_names(self._settings))

    async def _make(self, features: Features, spec: BoxSpec, door: Door | None) -> LocalBox:
        dirs = _dirs(spec, bubblewrap.reserved_names(self._settings))
        groups = self._controllers.plan(spec.box_id, self._limits(spec)) if self._controllers else {}
        record = BoxRecord(
            backend=self.name,
            spec=replace(spec, env=dict(spec.env), labels=dict(spec.labels), kwargs=dict(spec.kwargs)),
            door=door.host_address if door else None,
            created=time.time(),
            cgroups=tuple(map(str, groups)),
        )
        await asyncio.to_thread(self._store.create, record, dirs)
        box = self._box(features, record)
        if spec.workdir:
            try:
                await box.make_dir(spec.workdir)
            except RuntimeFailure:
                await box.destroy()
                raise
        return box

    def _limits(self, spec: BoxSpec) -> Limits:
        settings = self._settings
        return Limits(
            memory_mb=spec.memory_mb if spec.memory_mb is not None else settings.default_memory_mb,
            pids=spec.pids if spec.pids is not None else settings.default_pids,
            cpus=spec.cpus,
        )

    def _box(self, features: Features, record: BoxRecord) -> LocalBox:
        return LocalBox(
            store=self._store,
            record=record,
            settings=self._settings,
            features=features,
            controllers=self._controllers,
            limits=self._limits(record.spec),
            shell=self._shell,
        )

    async def attach(self, box_id: str, door: Door | None = None) -> LocalBox | None:
        features = await self._ready()
        record = await asyncio.to_thread(self._store.load, box_id)
        if record is None:
            return None
        if door is not None and door.host_address != record.door:
            record = replace(record, door=door.host_address)
            await asyncio.to_thread(self._store.save, record)
        return self._box(features, record)

    async def boxes(self, **labels: str) -> list[BoxInfo]:
        return await asyncio.to_thread(self._store.find, labels)


async def _version(path: str) -> tuple[int, ...]:
    process = await asyncio.create_subprocess_exec(
        path, "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={}
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            stdout, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BoxStartFailed(f"{path} --version does not end") from None
    return bubblewrap.parse_version(stdout.decode("utf-8", "replace"))


def _dirs(spec: BoxSpec, reserved: frozenset[str]) -> tuple[str, ...]:
    """The names at / of the folders that `kwargs["dirs"]` and `workdir` ask for."""
    wanted = spec.kwargs.get("dirs", ())
    if not isinstance(wanted, list | tuple) or not all(isinstance(item, str) for item in wanted):
        raise SpecRefused(f"dirs must be a list of folders such as '/testbed', not {wanted!r}")
    names: dict[str, None] = {}
    for path in (*wanted, *((spec.workdir,) if spec.workdir else ())):
        try:
            parts = split(path)
        except PathRefused as error:
            raise SpecRefused(error.message) from error
        if parts[:2] in (("polar", "session"), ("polar", "home")) or parts[:1] == ("tmp",):
            continue
        if not parts or parts[0] in reserved or not NAME.fullmatch(parts[0]):
            raise SpecRefused(f"a box of the local runtime can have no folder {path!r} of its own")
        names[parts[0]] = None
    return tuple(names)


class LocalBox(FolderBox):
    """A box over bubblewrap."""

    def __init__(
        self,
        *,
        store: BoxStore,
        record: BoxRecord,
        settings: LocalSettings,
        features: Features,
        controllers: Controllers | None,
        limits: Limits,
        shell: str,
    ) -> None:
        super().__init__(store, record)
        self._settings = settings
        self._features = features
        self._controllers = controllers
        self._limits = limits
        self._shell_path = shell
        self._reserved = bubblewrap.reserved_names(settings)
        self._groups = LimitGroups(tuple(map(Path, record.cgroups)))

    @property
    def _shell(self) -> str:
        return self._shell_path

    @property
    def session_dir(self) -> str:
        return SESSION_DIR

    @property
    def door_url(self) -> str | None:
        if self._record.door is None or self.spec.network == "none":
            return None
        host, port = self._record.door
        if self.spec.network == "proxy-only":
            host, port = "127.0.0.1", self._settings.door_port
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": self._settings.search_path,
            "HOME": HOME,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": self._shell_path,
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
        }

    def _locate(self, path: str, *, create: bool) -> tuple[Path, tuple[str, ...]]:
        parts = split(path)
        folder = self._folder
        if parts[:1] == ("tmp",):
            return folder.tmp, parts[1:]
        if parts[:1] == ("polar",):
            if parts[1:2] == ("session",):
                return folder.session, parts[2:]
            if parts[1:2] == ("home",):
                return folder.home, parts[2:]
        if not parts or parts[0] in self._reserved or not NAME.fullmatch(parts[0]):
            raise PathRefused(f"{path!r} is not in a folder of the box")
        top = folder.dirs / parts[0]
        if create:
            top.mkdir(exist_ok=True)
        elif not top.is_dir():
            raise PathRefused(f"the box has no folder '/{parts[0]}'")
        return top, parts[1:]

    async def make_dir(self, path: str) -> None:
        """Make a folder with its parents. Raises PathRefused, TransferFailed."""
        await self._in_thread(lambda: make_dir(*self._locate(path, create=True)))

    async def _limit_groups(self) -> LimitGroups | None:
        if not self._groups.paths or self._controllers is None:
            return None
        if not await asyncio.to_thread(self._groups.exist):
            await self._make_groups(self._controllers)
        return self._groups

    async def _make_groups(self, controllers: Controllers) -> None:
        paths = tuple(map(str, controllers.plan(self.box_id, self._limits)))
        if paths != self._record.cgroups:  # the node has restarted in another group; what it left must stay findable
            await asyncio.to_thread(self._groups.remove)
            self._record = replace(self._record, cgroups=paths)
            await asyncio.to_thread(self._store.save, self._record)
        try:
            self._groups = await asyncio.to_thread(LimitGroups.make, controllers, self.box_id, self._limits)
        except OSError as error:
            raise BoxStartFailed(f"the limits of box {self.box_id} could not be set: {error}") from error

    def _rlimits(self) -> list[tuple[int, int]]:
        """Limits of each single process: no core files, and what no cgroup limits here."""
        limits = [(resource.RLIMIT_CORE, 0)]
        if self.spec.storage_mb is not None:
            limits.append((resource.RLIMIT_FSIZE, self.spec.storage_mb << 20))
        controllers = self._controllers
        if self._limits.memory_mb is not None and not (controllers and controllers.limits("memory")):
            # not RLIMIT_AS: Node.js and Go reserve far more addresses than they ever use
            limits.append((resource.RLIMIT_DATA, self._limits.memory_mb << 20))
        if self._limits.pids is not None and not (controllers and controllers.limits("pids")):
            limits.append((resource.RLIMIT_NPROC, self._limits.pids))
        return [(kind, value) for kind, value in limits if _lowers(kind, value)]

    async def _start(self, job: Job) -> CommandProcess:
        settings, record = self._settings, self._record
        door = None
        if job.network == "proxy-only" and record.door is not None:
            door = DoorPlan(settings.door_port, record.door, settings.max_door_connections, settings.door_patience)
        folder: BoxFolder = self._folder

        def options(status_fd: int, block_fd: int) -> list[str]:
            return bubblewrap.arguments(
                features=self._features,
                settings=settings,
                folder=folder,
                extra=folder.extra(),
                env=job.env,
                cwd=job.cwd,
                network=job.network,
                status_fd=status_fd,
                block_fd=block_fd,
            )

        plan = SandboxPlan(
            bwrap=self._features.path,
            box_id=self.box_id,
            options=options,
            door=door,
            groups=self._groups if self._groups.paths else None,
            rlimits=self._rlimits(),
            patience=settings.start_timeout,
        )
        return await SandboxProcess.start(plan, job.command)

    def _find_processes(self) -> Iterable[int]:
        return {*marked(self.box_id), *self._groups.members()}

    async def _clean_up(self) -> None:
        await asyncio.to_thread(self._groups.remove)


def _lowers(kind: int, value: int) -> bool:
    hard = resource.getrlimit(kind)[1]
    return hard == resource.RLIM_INFINITY or value <= hard
