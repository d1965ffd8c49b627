"""The same promises on uvloop, whose subprocesses, sockets and handles are not asyncio's own."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
import uvloop

from polar.runtime import BoxSpec, Door, create_runtime


async def story(name: str, root: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    runtime = await asyncio.to_thread(create_runtime, name, {"root": str(root), "allow_unsafe_local": True})
    probe = await runtime.probe()
    if not probe.ok:
        pytest.skip(f"{name}: {probe.reason}")
    door = Door(server.sockets[0].getsockname()[:2])
    box = await runtime.create(BoxSpec(box_id=str(uuid.uuid4()), memory_mb=512), door)
    ask = """
import os, socket, sys
host, port = os.environ["DOOR"].removeprefix("http://").split(":")
s = socket.create_connection((host, int(port)))
s.sendall(sys.stdin.buffer.read()); s.shutdown(socket.SHUT_WR)
n = 0
while d := s.recv(65536): n += d.count(b"X")
print(n)
"""
    data = b"x" * 2_000_000
    outcome = await box.exec(["python3", "-c", ask], stdin=data, env={"DOOR": box.door_url or ""}, timeout=60)
    assert outcome.stdout == b"2000000\n", outcome.stderr_text
    outcome = await box.exec("(setsid sleep 1000 &); echo x; sleep 1000", timeout=0.5)
    assert (outcome.timed_out, outcome.stdout) == (True, b"x\n")
    task = asyncio.create_task(box.exec("sleep 1000"))
    await box.exec("true")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    outcomes = await asyncio.gather(*(box.exec(f"exit {n}") for n in range(8)))
    assert [outcome.return_code for outcome in outcomes] == list(range(8))
    await box.destroy()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("name", [pytest.param("local", marks=pytest.mark.sandbox), "local-unsafe"])
def test_commands_doors_and_kills_work(name, tmp_path):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story(name, tmp_path / "boxes"))
