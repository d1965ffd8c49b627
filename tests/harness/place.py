"""Where a real harness runs in these tests: a box of the local runtime, whose only way out is one proxy.

    place = await places(door, read_only=[...], path=[...])          # a fixture of conftest.py
    ran = await place.run(Launch(command=[...]), prompt="...")
    ran.code, ran.out, place.exchanges, await door.settled()

The harness sees what a gateway shows it: `polar.gateway.environment` makes the variables, the session's token is its
API key, the door is `http://127.0.0.1:8700` in a network of its own. Between door and proxy a relay notes every
request and the status it was answered with, so a test sees also what left no record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar.client.files import frame
from polar.gateway.environment import harness_environment, instruction_file
from polar.gateway.harness import Launch, Session
from polar.runtime import Box, ExecOutcome
from polar.schemas import (
    AgentSpec,
    Budgets,
    BuilderSpec,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    CustomShell,
    EvaluatorSpec,
    Event,
    Outcome,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Status,
    TaskRequest,
    encode,
)
from polar.schemas import SessionAssigned as Assigned
from tests.proxy.harness import Door

MODEL = "the-policy"
PROMPT = "Make hello.txt and tell me what is in it."
RECORDS_DIR = "POLAR_TEST_RECORDS_DIR"
CHUNK = 65536
_REQUEST = re.compile(rb"\A([A-Z]+) (\S+) HTTP/1\.1\r\n")
_STATUS = re.compile(rb"\AHTTP/1\.1 (\d{3}) ")
_KEY = re.compile(r"/s/[^/]+/")


@dataclass(slots=True)
class Exchange:
    """One request that came through the door. `status` None: not answered (yet)."""

    method: str
    path: str
    status: int | None = None


@dataclass
class Relay:
    """Hands connections on to a proxy and notes what is asked and answered. A context manager.

    A head is looked for where a read begins: no side of HTTP/1.1 without pipelining begins one elsewhere.
    """

    target: tuple[str, int]
    exchanges: list[Exchange] = field(default_factory=list)
    port: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            there_reader, there = await asyncio.open_connection(*self.target)
            asked: list[Exchange] = []
            ways = [
                asyncio.create_task(self._way(reader, there, lambda data: self._asked(data, asked))),
                asyncio.create_task(self._way(there_reader, writer, lambda data: _answered(data, asked))),
            ]
            try:
                # whichever side goes away takes the other with it: a client that leaves is seen at once
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                there.close()
        finally:
            writer.close()
            self._open.discard(task)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Any) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                note(data)
                writer.write(data)
                await writer.drain()

    def _asked(self, data: bytes, asked: list[Exchange]) -> None:
        if found := _REQUEST.match(data):
            path = _KEY.sub("/s/KEY/", found[2].decode())
            asked.append(Exchange(found[1].decode(), path))
            self.exchanges.append(asked[-1])


def _answered(data: bytes, asked: list[Exchange]) -> None:
    if (found := _STATUS.match(data)) and asked and asked[-1].status is None:
        asked[-1].status = int(found[1])


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a harness ended. `code` None: it was killed, for its time was up."""

    code: int | None
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Place:
    """A box with its door, for one session."""

    box: Box
    door: Door
    relay: Relay
    session: str

    @property
    def exchanges(self) -> list[Exchange]:
        return self.relay.exchanges

    @property
    def statuses(self) -> list[int | None]:
        """Of the generations asked for, in order."""
        return [one.status for one in self.exchanges if one.method == "POST"]

    def told(self, prompt: str = PROMPT, **token: Any) -> Session:
        """What a gateway tells an adapter of this session. `token`: changes of the session's token."""
        agent = AgentSpec(harness="shell", custom_shell=CustomShell(command="true"), model_name=MODEL)
        event = Assigned(
            assignment_id="a1",
            node="n1",
            boot="b1",
            session_id=self.session,
            attempt=1,
            task_id="t1",
            group_id="g1",
            sample=2,
            task=TaskRequest(task_id="t1", instruction=prompt, agent=agent),
        )
        key = self.door.key(self.session, **token)
        folder, url = self.box.session_dir, self.box.door_url
        env = harness_environment(
            event, session_dir=folder, instruction=prompt, inline_bytes=65536, model=MODEL, base_url=url, key=key
        )
        return Session(
            session_id=self.session,
            attempt=1,
            task_id="t1",
            agent=agent,
            instruction=prompt,
            instruction_file=instruction_file(folder),
            workdir=env["POLAR_WORKSPACE"],
            session_dir=folder,
            model=MODEL,
            base_url=url,
            key=key,
            environment=env,
        )

    async def run(self, launch: Launch, told: Session, timeout: float = 240.0) -> Ran:
        """Run a harness to its end, as a gateway does."""
        for path, data in {told.instruction_file: told.instruction.encode(), **launch.files}.items():
            await self.box.write_file(path, data)
        outcome: ExecOutcome = await self.box.exec(
            launch.command, cwd=launch.cwd, env={**told.environment, **launch.env}, stdin=launch.stdin, timeout=timeout
        )
        ran = Ran(
            code=outcome.return_code, out=outcome.stdout_text, err=outcome.stderr_text, seconds=outcome.duration_s
        )
        print(f"{self.session}: code {ran.code} after {ran.seconds:.1f} s\n{ran.out}\n{ran.err}")
        for one in self.exchanges:
            print(f"{self.session}: {one.method} {one.path} -> {one.status}")
        return ran

    async def file(self, name: str) -> str:
        """A file of the workspace."""
        return (await self.box.read_file(f"{self.box.session_dir}/workspace/{name}")).decode()

    async def records(self) -> list[Any]:
        """The session's records, once no call is under way."""
        return await self.door.settled(self.session)

    async def dump(self, name: str) -> None:
        """Keep the session as a builder reads it, where POLAR_TEST_RECORDS_DIR names a folder.

        `NAME.msgpack` holds the values of `polar.completions` in order, from `SessionOpened` to `SessionFinal`, as
        `polar.client.files.read_values` reads them.
        """
        if folder := os.environ.get(RECORDS_DIR):
            whole = framed_session(self.session, await self.records())
            await asyncio.to_thread(_write, Path(folder) / f"{name}.msgpack", b"".join(frame(encode(e)) for e in whole))


def framed_session(session: str, records: Sequence[Event]) -> list[Event]:
    """What the proxy wrote, between what the scheduler would have written before and after it."""
    opened = SessionOpened(
        session_id=session,
        task_id="t1",
        group_id="g1",
        sample=2,
        num_samples=4,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        harness="shell",
        builder=BuilderSpec(),
        evaluator=EvaluatorSpec(),
        model_name=MODEL,
        budgets=Budgets(queue_ttl=600, init_timeout=600, timeout_seconds=600, evaluation_timeout=600),
        at_ms=0,
    )
    closed = SessionClosed(session_id=session, attempt=1, outcome=Outcome(status=Status.COMPLETED), at_ms=0)
    return [opened, *records, closed, SessionFinal(session_id=session, attempt=1, at_ms=0)]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def captures(records: list[Any]) -> list[CompletionCaptured]:
    """The captured calls; there is nothing else, and every call that began has ended."""
    found = [one for one in records if isinstance(one, CompletionCaptured)]
    assert len(found) * 2 == len(records), [type(one).__name__ for one in records]
    assert {one.completion_id for one in records if isinstance(one, CallStarted)} == {
        one.completion_id for one in found
    }
    return found


def failures(records: list[Any]) -> list[int | None]:
    """The statuses that failed calls were answered with."""
    return [one.http_status for one in records if isinstance(one, CompletionFailed)]
