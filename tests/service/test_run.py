"""How a process of services starts, drains and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from polar.service.run import serve

HEAD = """
import asyncio, sys
from contextlib import asynccontextmanager
from polar.service.logs import configure_logs
from polar.service.run import run_services
configure_logs("info", "json")

class Works:
    def __init__(self): self.done = asyncio.Event()
    async def run(self):
        try:
            print("running", flush=True)
            await asyncio.Event().wait()
        finally:
            print("stopped", flush=True)
"""


def start(body: str) -> subprocess.Popen[str]:
    program = HEAD + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def last_error(stderr: str) -> dict[str, str]:
    lines: list[dict[str, str]] = [json.loads(line) for line in stderr.splitlines()]
    errors = [line for line in lines if line["level"] == "error"]
    assert len(errors) == 1, stderr
    return errors[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_success(number: signal.Signals) -> None:
    process = start("""
        class Drains(Works):
            async def drain(self):
                print("draining", flush=True)
        sys.exit(run_services([Drains()]))
    """)
    wait_for(process, "running")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert out.split() == ["draining", "stopped"], err
    assert process.returncode == 0


def test_a_second_signal_stops_at_once() -> None:
    process = start("""
        class Drains(Works):
            async def drain(self):
                print("draining", flush=True)
                await asyncio.Event().wait()
        sys.exit(run_services([Drains()], grace_s=60))
    """)
    wait_for(process, "running")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "draining")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - begun < 10


def test_a_drain_is_cut_off_after_its_grace() -> None:
    process = start("""
        class Drains(Works):
            async def drain(self):
                await asyncio.Event().wait()
        sys.exit(run_services([Drains()], grace_s=0.2))
    """)
    wait_for(process, "running")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "stopping what is not done yet" in err


def test_a_service_that_fails_stops_the_others_and_the_process_with_one_line() -> None:
    process = start("""
        class Fails:
            async def run(self):
                await asyncio.sleep(0.1)
                raise ValueError("the reason")
        sys.exit(run_services([Works(), Fails()]))
    """)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert out.split() == ["running", "stopped"]
    found = last_error(err)
    assert (found["event"], found["kind"]) == ("the reason", "ValueError")
    assert "Traceback" in found["exception"], "an error that nobody named comes with its traceback"


def test_a_service_that_ends_by_itself_is_a_failure() -> None:
    process = start("""
        class Ends:
            async def run(self): pass
        sys.exit(run_services([Works(), Ends()]))
    """)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert last_error(err)["event"] == "Ends ended by itself"


def test_a_broker_that_is_away_is_one_clear_line_without_a_traceback() -> None:
    process = start("""
        from polar.bus import Bus, BusSettings
        from polar.schemas.topics import Service
        settings = BusSettings(bootstrap="127.0.0.1:9", connect_timeout_s=0.5, blob_url="memory:///")
        @asynccontextmanager
        async def opened():
            async with Bus(settings, Service.PROXY):
                yield [Works()]
        sys.exit(run_services(opened))
    """)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    found = last_error(err)
    assert found["event"] == "cannot reach Kafka at 127.0.0.1:9: start one or set POLAR_KAFKA_BOOTSTRAP"
    assert "exception" not in found


def test_a_signal_while_opening_stops_too() -> None:
    process = start("""
        @asynccontextmanager
        async def opened():
            print("opening", flush=True)
            await asyncio.Event().wait()
            yield []
        sys.exit(run_services(opened))
    """)
    wait_for(process, "opening")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130


class Idle:
    def __init__(self) -> None:
        self.stopped = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


async def test_cancelling_serve_stops_its_services() -> None:
    service = Idle()
    task = asyncio.create_task(serve([service]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.stopped


async def test_a_service_that_fails_while_draining_is_raised() -> None:
    class Fails:
        def __init__(self) -> None:
            self.draining = asyncio.Event()

        async def run(self) -> None:
            await self.draining.wait()
            raise ValueError("while draining")

        async def drain(self) -> None:
            self.draining.set()
            await asyncio.Event().wait()

    stop = asyncio.Event()
    stop.set()
    with pytest.raises(ValueError, match="while draining"):
        await serve([Fails()], stop=stop)


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    process = start("""
        import polar.service.run, threading
        polar.service.run.LEAVE_S = 0.5

        class Hangs:
            async def run(self):
                await asyncio.gather(asyncio.to_thread(threading.Event().wait), self.fails())
            async def fails(self):
                raise OSError("broken")
        sys.exit(run_services([Hangs()]))
    """)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [json.loads(line)["event"] for line in stderr.splitlines()] == [
        "broken",
        "a thread does not end; leaving without it",
    ]
