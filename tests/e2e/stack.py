"""Polar as a user runs it: one process per service, each of which can be killed and started again.

Waiting is always for a condition; the deadline only bounds how long a broken run takes to fail.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polar.bus import BusSettings

POLAR = (sys.executable, "-m", "polar.cli.main")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def _state(pid: int) -> str:
    """A process's state as Linux tells it: R, S, T (stopped), Z (ended); X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


class Stack:
    """Processes of one installation with a topic prefix and a state folder of its own."""

    def __init__(
        self, root: Path, bootstrap: str, engine_url: str, *, prefix: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.prefix = prefix
        self.submit_port, self.proxy_port, self.gateway_port = free_port(), free_port(), free_port()
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("POLAR_")},
            "POLAR_KAFKA_BOOTSTRAP": bootstrap,
            "POLAR_KAFKA_TOPIC_PREFIX": prefix,
            "POLAR_KAFKA_PARTITIONS": "4",
            "POLAR_KAFKA_TASK_PARTITIONS": "2",
            "POLAR_KAFKA_NODE_PARTITIONS": "2",
            "POLAR_STATE_DIR": str(root / "state"),
            "POLAR_SUBMIT_PORT": str(self.submit_port),
            "POLAR_PROXY_PORT": str(self.proxy_port),
            "POLAR_PROXY_ENGINE_URLS": engine_url,
            # the scripted engine's log-probabilities know no temperature, so a self-test would call them raw
            "POLAR_PROXY_LOGPROBS_MODE": "processed_logprobs",
            "POLAR_GATEWAY_PROXY_ADDRESS": f"127.0.0.1:{self.proxy_port}",
            "POLAR_GATEWAY_RUNTIME_API_PORT": str(self.gateway_port),
            "POLAR_SCHEDULER_FINAL_GRACE": "5",
            "POLAR_SCHEDULER_NODE_SILENCE": "8",
            "POLAR_SCHEDULER_RETRY_BACKOFF": "0.2",
            "POLAR_LOG_LEVEL": "info",
            "POLAR_SHUTDOWN_GRACE_S": "5",
            **(env or {}),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {}
        root.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *services: str, env: Mapping[str, str] | None = None) -> None:
        """Start `polar serve` under a name; `services` default to the name itself."""
        self._started[name] = (services, env or {})
        log = (self.root / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [*POLAR, "serve", *(services or (name,))],
            env={**self.env, **(env or {})},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=self.root,
        )
        log.close()

    def restart(self, name: str) -> None:
        """Start again what was started under a name and has ended, with the same services and variables."""
        services, env = self._started[name]
        self.start(name, *services, env=env)

    def pause(self, name: str) -> None:
        """SIGSTOP; returns once the process stands."""
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: _state(process.pid) in "TZX", f"{name} stands")

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.processes[name].send_signal(signal.SIGCONT)

    def ended(self) -> list[str]:
        """Names of processes that have ended though nobody told them to."""
        return [name for name, process in list(self.processes.items()) if process.poll() is not None]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # one that stands hears nothing
        for name, process in list(self.processes.items()):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{name} did not stop on SIGTERM:\n{self.tail(name)}") from None
        self.processes.clear()

    def tail(self, name: str, lines: int = 30) -> str:
        """The last it said; aiokafka's own words on a broker that is away, many a second, are left out."""
        path = self.root / f"{name}.log"
        if not path.exists():
            return ""
        said = path.read_text(errors="replace").splitlines()
        return "\n".join([line for line in said if '"logger":"aiokafka' not in line][-lines:])

    def tails(self, lines: int = 30) -> str:
        logs = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {path.stem}\n{self.tail(path.stem, lines)}" for path in logs)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Until the API is ready and a gateway beats, unless a process ended before."""

        def ready() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}:\n{self.tail(name)}")
            return all(
                self.answers(f"http://127.0.0.1:{port}{path}")
                for port, path in ((self.submit_port, "/ready"), (self.proxy_port, "/ready"))
            )

        wait_until(ready, "submit and proxy are ready", timeout_s)

    @staticmethod
    def answers(url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def polar(
        self, *arguments: str, timeout_s: float = 120.0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI to its end."""
        return subprocess.run(
            [*POLAR, *arguments],
            env={**self.env, "COLUMNS": "200"},
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    async def apolar(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(self.polar, *arguments, **options)  # type: ignore[arg-type]

    def bus_settings(self) -> BusSettings:
        return BusSettings(
            bootstrap=self.env["POLAR_KAFKA_BOOTSTRAP"],
            topic_prefix=self.prefix,
            partitions=int(self.env["POLAR_KAFKA_PARTITIONS"]),
            task_partitions=int(self.env["POLAR_KAFKA_TASK_PARTITIONS"]),
            node_partitions=int(self.env["POLAR_KAFKA_NODE_PARTITIONS"]),
            blob_url=(self.root / "state" / "blobs").as_uri(),
        )


def shell_agent(script: Path, turns: int = 2) -> Sequence[str]:
    """Write an agent that needs the standard library only and makes `turns` calls in one conversation."""
    script.write_text(
        f"""import json, os, urllib.request
messages = []
for turn in range({turns}):
    messages.append({{"role": "user", "content": f"turn {{turn}} of {{os.environ['SESSION_ID']}}"}})
    body = json.dumps({{"model": os.environ.get("POLAR_MODEL", "policy"), "messages": messages}}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {{
        "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
    with urllib.request.urlopen(request, timeout=60) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append({{"role": "assistant", "content": message["content"]}})
open("answer.txt", "w").write(messages[-1]["content"])
"""
    )
    return ["python3", script.name]
