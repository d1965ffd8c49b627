"""Running the broker as a process of its own: what test fixtures and `polar up` use.

Promises: `spawn` returns when clients can connect; `stop` ends the process it started and no other. The child
stops when its parent is gone, also after SIGKILL, because its standard input ends then.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from polar.broker.errors import BrokerNotReady

__all__ = ["BrokerProcess", "spawn", "spawn_sync"]


class BrokerProcess:
    """A broker started by `spawn`. `bootstrap` is its `host:port`; the port stays the same over `restart`."""

    def __init__(self, directory: Path, port: int, options: tuple[str, ...]) -> None:
        self.directory = directory
        self.bootstrap = ""
        self._port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Raises `BrokerNotReady` when it was not started."""
        if self._process is None:
            raise BrokerNotReady("the broker was not started")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start_sync(self, timeout: float = 30.0) -> "BrokerProcess":
        """Start the process and wait until clients can connect. Raises `BrokerNotReady` with what it said."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="broker-") as scratch:
            ready, said = Path(scratch) / "ready", self.directory / "broker.log"
            command = [sys.executable, "-m", "polar.broker", "--dir", str(self.directory), "--port", str(self._port)]
            command += ["--ready-file", str(ready), "--until-eof", *self._options]
            with said.open("ab") as log:
                start = log.tell()
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                )
            deadline = time.monotonic() + timeout
            while not ready.exists():
                code = self._process.poll()
                if code is not None or time.monotonic() > deadline:
                    self.kill_sync()
                    how = f"ended with {code}" if code is not None else f"was not ready within {timeout:g} s"
                    with said.open("rb") as log:
                        log.seek(start)
                        words = log.read()[-2000:].decode(errors="replace").strip()
                    raise BrokerNotReady(f"the broker {how}: {words or 'it said nothing'}")
                time.sleep(0.01)
            self.bootstrap = ready.read_text().strip()
        self._port = int(self.bootstrap.rpartition(":")[2])
        return self

    def stop_sync(self, timeout: float = 20.0) -> int | None:
        """SIGTERM, and SIGKILL after `timeout` seconds; returns the exit code."""
        return self._end(signal.SIGTERM, timeout)

    def kill_sync(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL, 20.0)

    async def start(self, timeout: float = 30.0) -> "BrokerProcess":
        return await asyncio.to_thread(self.start_sync, timeout)

    async def stop(self, timeout: float = 20.0) -> int | None:
        return await asyncio.to_thread(self.stop_sync, timeout)

    async def kill(self) -> None:
        await asyncio.to_thread(self.kill_sync)

    async def __aenter__(self) -> "BrokerProcess":
        return self if self.is_running else await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def __enter__(self) -> "BrokerProcess":
        return self if self.is_running else self.start_sync()

    def __exit__(self, *exception: object) -> None:
        self.stop_sync()

    def _end(self, how: signal.Signals, timeout: float) -> int | None:
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(how)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()


def spawn_sync(directory: Path | str, *options: str, port: int = 0, timeout: float = 30.0) -> BrokerProcess:
    """Start a broker on `directory` and wait until it is ready; `options` are those of `python -m polar.broker`.

    What it logs goes to `broker.log` in the directory. Raises `BrokerNotReady`.
    """
    return BrokerProcess(Path(directory), port, options).start_sync(timeout)


async def spawn(directory: Path | str, *options: str, port: int = 0, timeout: float = 30.0) -> BrokerProcess:
    """`spawn_sync` without blocking the loop. Also `async with await spawn(…) as broker:`."""
    return await BrokerProcess(Path(directory), port, options).start(timeout)
