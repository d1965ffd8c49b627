"""Brokers that a test may kill: the embedded one, and an Apache Kafka of the suite's own. Same port and data after."""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Protocol

from polar.broker import spawn
from polar.broker.process import BrokerProcess

KAFKA_DIR, KAFKA_START = "POLAR_TEST_KAFKA_DIR", "POLAR_TEST_KAFKA_START"
"""The folder that the start command makes `pid` and `log` in; a shell command that prints `…KAFKA_BOOTSTRAP=host:port`
when the broker answers, and does nothing where it runs already."""
START_S = 180.0


class KillableBroker(Protocol):
    @property
    def bootstrap(self) -> str: ...

    async def start(self) -> None:
        """Start it again and return when it answers."""
        ...

    async def kill(self) -> None:
        """SIGKILL, and return when it is gone."""
        ...

    async def stop(self) -> None: ...

    def tail(self) -> str:
        """The last it said."""
        ...


class Embedded:
    """`polar.broker` as a process."""

    def __init__(self, process: BrokerProcess) -> None:
        self._process = process

    @classmethod
    async def new(cls, folder: Path) -> Embedded:
        return cls(await spawn(folder, timeout=START_S))

    @property
    def bootstrap(self) -> str:
        return self._process.bootstrap

    async def start(self) -> None:
        await self._process.start(START_S)

    async def kill(self) -> None:
        await self._process.kill()

    async def stop(self) -> None:
        await self._process.stop()

    def tail(self) -> str:
        return _tail(self._process.directory / "broker.log")


class ApacheKafka:
    """What the environment says how to start."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder = folder
        self._command = command
        self.bootstrap = ""

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        ran = subprocess.run(shlex.split(self._command), check=False, capture_output=True, text=True, timeout=START_S)
        assert ran.returncode == 0, f"{self._command} failed: {ran.stdout}{ran.stderr}"
        self.bootstrap = ran.stdout.strip().rpartition("KAFKA_BOOTSTRAP=")[2]

    async def kill(self) -> None:
        await asyncio.to_thread(self._end, signal.SIGKILL)

    async def stop(self) -> None:
        await asyncio.to_thread(self._end, signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        # not a child of ours, so a handle tells when it has ended: its port is free only then
        handle = os.pidfd_open(int((self._folder / "pid").read_text()))
        try:
            signal.pidfd_send_signal(handle, number)
            gone, _, _ = select.select([handle], [], [], START_S)
        finally:
            os.close(handle)
        assert gone, f"Apache Kafka did not end on {number.name}"

    def tail(self) -> str:
        return _tail(self._folder / "log")


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
