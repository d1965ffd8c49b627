"""Processes of `benchmarks/proxy.py`: started, waited for, and what the kernel says they cost (Linux, /proc)."""

import asyncio
import os
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

START_S = 90.0
"""Until a process must answer."""
TICK = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and its descendants; empty: it has ended."""
    found = [pid] if Path(f"/proc/{pid}/cmdline").read_bytes() else []
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of a process, its children and those of them that have ended."""
    total = 0
    for one in family(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(number) for number in fields[11:15])
    return total / TICK


def memory_mb(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def machine_busy_s() -> float:
    """Seconds that all processors together have been busy."""
    fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICK


@asynccontextmanager
async def process(*command: str, log: Path, env: dict[str, str] | None = None) -> AsyncIterator[int]:
    """Runs a command; gives its id."""
    with log.open("wb") as out:
        one = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=asyncio.subprocess.STDOUT, env=env, cwd=log.parent
        )
    try:
        yield one.pid
    finally:
        if one.returncode is None:
            one.terminate()
            try:
                async with asyncio.timeout(20):
                    await one.wait()
            except TimeoutError:
                one.kill()
                await one.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body


async def answers(url: str, pid: int, log: Path) -> None:
    """Waits until `url` answers 200."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and family(pid):
        try:
            await asyncio.to_thread(get, url)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            return
    raise SystemExit(f"{url} does not answer:\n{(await asyncio.to_thread(log.read_text))[-3_000:]}")
