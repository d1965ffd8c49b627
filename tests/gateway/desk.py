"""A scheduler's desk and a model's door for gateways under test: real Kafka, real boxes, nothing of ours faked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from polar.bus import Bus, BusSettings, Out, Reader
from polar.gateway import GatewayService, GatewaySettings
from polar.runtime.local.procs import marked
from polar.schemas import (
    AgentSpec,
    CustomShell,
    NodeHeartbeat,
    RuntimeSpec,
    SessionAssigned,
    SessionReady,
    SessionReleased,
    SessionRevoked,
    Stage,
    StageChanged,
    TaskRequest,
)
from polar.schemas.ids import derived
from polar.service.settings import CommonSettings
from polar.service.tokens import BoxKey, sign_box

NODE = "node-1"
PATIENCE_S = 60.0


def shell_task(command: str, *, prepare: list[Any] | None = None, **fields: Any) -> TaskRequest:
    return TaskRequest(
        task_id="t",
        instruction=fields.pop("instruction", "Say hello."),
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command=command)),
        runtime=RuntimeSpec(prepare=prepare or []),
        **fields,
    )


@dataclass
class Desk:
    """Writes assignments as the scheduler would, and reads what the node says."""

    bus: Bus
    reader: Reader
    reports: list[StageChanged] = field(default_factory=list)
    beats: list[NodeHeartbeat] = field(default_factory=list)
    ready: list[SessionReady] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    async def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Read on until `condition` gives something; its value."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if found := condition():
                    return found
                for record in await self.reader.poll(timeout_s=0.5):
                    assert record.error is None
                    if isinstance(record.value, StageChanged):
                        assert record.key == record.value.session_id
                        self.reports.append(record.value)
                    elif isinstance(record.value, NodeHeartbeat):
                        self.beats.append(record.value)
                    elif isinstance(record.value, SessionReady):
                        assert record.key == NODE
                        self.ready.append(record.value)

    async def beat(self, condition: Callable[[NodeHeartbeat], bool] = lambda beat: True) -> NodeHeartbeat:
        """The next new heartbeat that fulfils the condition."""
        seen = len(self.beats)
        found: NodeHeartbeat = await self.until(lambda: next(filter(condition, self.beats[seen:]), None))
        return found

    async def boot(self) -> str:
        return (await self.beat()).boot_id

    def assignment(self, boot: str, task: TaskRequest, session: str | None = None) -> SessionAssigned:
        session = session or derived("test session", next(self.numbers))
        return SessionAssigned(
            assignment_id=derived("assignment", session, 1),
            node=NODE,
            boot=boot,
            session_id=session,
            attempt=1,
            task_id="t",
            group_id="g",
            sample=0,
            task=task,
        )

    async def assign(self, boot: str, task: TaskRequest, session: str | None = None) -> SessionAssigned:
        event = self.assignment(boot, task, session)
        await self.bus.send(Out("assignments", NODE, event))
        return event

    async def revoke(self, event: SessionAssigned, reason: str = "cancelled by a test") -> None:
        value = SessionRevoked(
            node=NODE, boot=event.boot, session_id=event.session_id, attempt=event.attempt, reason=reason
        )
        await self.bus.send(Out("assignments", NODE, value))

    async def release(self, event: SessionAssigned) -> None:
        value = SessionReleased(node=NODE, boot=event.boot, session_id=event.session_id, attempt=event.attempt)
        await self.bus.send(Out("assignments", NODE, value))

    def of(self, event: SessionAssigned) -> list[StageChanged]:
        return [one for one in self.reports if one.assignment == event.assignment_id]

    def stages(self, event: SessionAssigned) -> list[Stage]:
        return [one.stage for one in self.of(event)]

    async def reached(self, event: SessionAssigned, stage: Stage) -> StageChanged:
        found: StageChanged = await self.until(
            lambda: next((one for one in self.of(event) if one.stage is stage), None)
        )
        return found


@dataclass
class ModelDoor:
    """Where the model proxy would be: remembers who knocked, answers after `open`."""

    port: int
    keys: list[str] = field(default_factory=list)
    knocked: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        self.knocked.set()
        await self.open.wait()
        return web.Response(text="hello from the model\n")

    async def knocks(self, count: int) -> None:
        """Return when so many have knocked."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.keys) < count:
                self.knocked.clear()
                await self.knocked.wait()


KNOCK = (
    "import os, urllib.request as r; "
    "print(r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/wait', "
    "headers={'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})).read().decode(), end='')"
)
"""A harness that knocks at the door and waits for its answer; `shlex`-safe in double quotes."""
WAIT_AT_DOOR = f'python3 -c "{KNOCK}"'


@dataclass
class Site:
    """A machine for gateways: a state folder, a secret and settings."""

    common: CommonSettings
    secret: str
    bus: BusSettings
    settings: dict[str, Any]

    def gateway_settings(self, **changes: Any) -> GatewaySettings:
        return GatewaySettings(**{**self.settings, **changes})

    @property
    def folder(self) -> Path:
        return self.common.state_dir / "gateway" / NODE

    def box(self, event: SessionAssigned) -> str:
        return derived("box", event.assignment_id, event.boot)

    async def processes(self, event: SessionAssigned) -> list[int]:
        """What runs in the attempt's box."""
        return await asyncio.to_thread(marked, self.box(event))

    async def until_running(self, event: SessionAssigned, wanted: bool = True) -> None:
        """Return when something, or nothing, runs in the attempt's box."""
        async with asyncio.timeout(PATIENCE_S):
            while bool(await self.processes(event)) is not wanted:  # noqa: ASYNC110 - processes tell nobody
                await asyncio.sleep(0.02)

    def box_folder(self, event: SessionAssigned) -> Path:
        return self.folder / "boxes" / self.box(event)

    def box_key(self, event: SessionAssigned, *, not_after_ms: int) -> str:
        key = BoxKey(session_id=event.session_id, attempt=event.attempt, not_after_ms=not_after_ms)
        return sign_box(key, self.secret)

    @contextlib.asynccontextmanager
    async def gateway(self, **changes: Any) -> AsyncIterator[GatewayService]:
        """A gateway in this process."""
        service = GatewayService(self.gateway_settings(**changes), self.bus, self.common)
        task = asyncio.create_task(service.run())
        try:
            yield service
            if task.done():
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def environment(self, **changes: Any) -> dict[str, str]:
        """The same as `gateway`, for a process."""
        values = {**self.settings, **changes}
        return {
            **os.environ,
            **{f"POLAR_GATEWAY_{name.upper()}": str(value) for name, value in values.items()},
            "POLAR_KAFKA_BOOTSTRAP": self.bus.bootstrap,
            "POLAR_KAFKA_TOPIC_PREFIX": self.bus.topic_prefix,
            "POLAR_KAFKA_PARTITIONS": str(self.bus.partitions),
            "POLAR_KAFKA_TASK_PARTITIONS": str(self.bus.task_partitions),
            "POLAR_KAFKA_NODE_PARTITIONS": str(self.bus.node_partitions),
            "POLAR_KAFKA_BLOB_URL": self.bus.blob_url,
            "POLAR_STATE_DIR": str(self.common.state_dir),
            "POLAR_LOG_FORMAT": "json",
            "POLAR_SHUTDOWN_GRACE_S": "30",
        }

    @contextlib.asynccontextmanager
    async def process(self, **changes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
        """A gateway in a process of its own; killed at the end, if it still lives."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from polar.gateway import GatewayService; from polar.service.run import run_services; "
            "from polar.service.settings import CommonSettings; "
            "sys.exit(run_services([GatewayService()], grace_s=CommonSettings().shutdown_grace_s))",
            env=self.environment(**changes),
            cwd=self.common.state_dir,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def killed(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
