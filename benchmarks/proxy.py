"""What the proxy adds to a streamed call, beside LiteLLM's proxy and beside no proxy, in one run.

    uv run --extra dev python benchmarks/proxy.py [--quick] [--kafka HOST:PORT] [--litellm VENV | --no-litellm]

All are asked the same, in turns (A B A B …), in front of one engine that is all timetable (`proxy_stub.py`): the first
token after 0.5 s and 200 tokens over 2 s. Polar captures, to a real broker: the embedded one, or Apache Kafka where its
address is given. LiteLLM is installed into an environment of its own, which is kept where `--litellm` names one.
`--against CHECKOUT` measures another checkout's proxy besides. Takes 20 minutes or more; `--quick` about one.

Latencies are what a client waits beyond the engine: from its sending to the engine's getting the call, and from the
engine's writing a token to its coming; of which the same without a proxy, at the same percentile of the same round, is
taken off. CPU is what the kernel says of a proxy's process and its children (Linux, /proc). Engine, clients, broker and
proxies share the machine: the table tells how many cores each of them and everything else used meanwhile.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import uvloop
from proxy_processes import answers, cpu_s, free_port, get, machine_busy_s, memory_mb, process

from polar.broker import spawn
from polar.bus import Bus, BusSettings
from polar.bus.clients import stop_admin
from polar.schemas import CompletionCaptured
from polar.schemas.topics import Service
from polar.service.clock import SystemClock
from polar.service.tokens import SessionToken, sign_session

HERE = Path(__file__).parent
LITELLM = "litellm[proxy]==1.106.2"
SECRET = "of this benchmark alone, long enough for HS256"
MASTER_KEY = "sk-benchmark"
TOKENS = 200
FEWEST = 2
"""Tokens of a call that shows what a call costs without its tokens."""
CALL_S = 2.5
PROMPTS = {"2 KB": (2_000, 500), "32 KB": (32_000, 8_000)}
"""Bytes, and the tokens that the engine says they are."""
FROM_PACKAGES = ("aiohttp", "aiokafka", "msgspec", "uvloop")


class Load(NamedTuple):
    """One thing to measure. `calls`, `slow_calls`: in each round; the second of LiteLLM, which takes so much longer."""

    open: int
    prompt: str
    tokens: int
    calls: int
    slow_calls: int
    dialect: str = "openai.chat"


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    rounds: int
    spread_s: float
    """The clients begin evenly over so long."""
    latency: list[Load]
    per_token: dict[str, tuple[Load, Load]]
    """By prompt: calls of many tokens and of few."""
    saturated: Load
    saturated_slow: Load
    dialects: list[Load]

    @property
    def loads(self) -> list[Load]:
        pairs = [load for pair in self.per_token.values() for load in pair]
        return list(dict.fromkeys([*self.latency, *pairs, *self.dialects]))


OTHER_DIALECTS = ("anthropic.messages", "openai.responses", "google")


def whole(rounds: int) -> Extent:
    sizes = {1: (5, 5), 50: (100, 50), 200: (400, 200)}
    latency = [Load(n, prompt, TOKENS, *sizes[n]) for prompt in PROMPTS for n in sizes]
    return Extent(
        rounds=rounds,
        spread_s=CALL_S,
        latency=latency,
        per_token={
            prompt: (Load(50, prompt, TOKENS, *sizes[50]), Load(50, prompt, FEWEST, 200, 100)) for prompt in PROMPTS
        },
        saturated=Load(400, "2 KB", TOKENS, 1_000, 1_000),
        saturated_slow=Load(60, "2 KB", TOKENS, 60, 60),
        dialects=[Load(50, "2 KB", TOKENS, 100, 0, dialect) for dialect in OTHER_DIALECTS],
    )


def quick() -> Extent:
    many, few = Load(10, "2 KB", TOKENS, 20, 10), Load(10, "2 KB", FEWEST, 20, 10)
    return Extent(
        rounds=1,
        spread_s=1.0,
        latency=[Load(1, "2 KB", TOKENS, 1, 1), many],
        per_token={"2 KB": (many, few)},
        saturated=Load(100, "2 KB", TOKENS, 100, 100),
        saturated_slow=Load(10, "2 KB", TOKENS, 10, 10),
        dialects=[],
    )


# what is measured ---------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Of one load in one round. Seconds; `latency`: what each call waited beyond the engine, for first and end."""

    first: list[float]
    end: list[float]
    took: float
    calls: int
    cpu: float
    cores: dict[str, float]
    """Used meanwhile, by whom."""


@dataclass
class Subject:
    """Somebody to ask."""

    name: str
    port: int
    pid: int | None
    slow: bool = False
    signs: bool = False
    """Each client has its own session key."""
    settings: BusSettings | None = None
    """Where it captures to."""
    figures: dict[Load, list[Figures]] = field(default_factory=dict)
    asked: int = 0

    def keys(self, count: int) -> list[str]:
        return [self._session() for _ in range(count)] if self.signs else [MASTER_KEY] * count

    def _session(self) -> str:
        token = SessionToken(
            session_id=str(uuid4()),
            attempt=1,
            task_id=str(uuid4()),
            group_id=str(uuid4()),
            sample=0,
            model="policy",
            not_after_ms=SystemClock().now_ms() + 7_200_000,
        )
        return sign_session(token, SECRET)


class Bench:
    """The engine, who asks it, and what was seen."""

    def __init__(self, engine_port: int, engine_pid: int, broker_pid: int | None) -> None:
        self.engine_port = engine_port
        self.engine_pid = engine_pid
        self.subjects: list[Subject] = []
        self._others = {"engine": engine_pid} | ({} if broker_pid is None else {"broker": broker_pid})
        self._number = 0

    async def measure(self, subject: Subject, load: Load, calls: int, spread_s: float = 0.0) -> Figures:
        size, prompt_tokens = PROMPTS[load.prompt]
        plan = {
            "port": subject.port,
            "dialect": load.dialect,
            "keys": subject.keys(min(load.open, calls)),
            "calls": calls,
            "number": self._number,
            "prompt_bytes": size,
            "prompt_tokens": prompt_tokens,
            "tokens": load.tokens,
            "spread_s": spread_s if load.open > 1 else 0.0,
        }
        self._number += calls
        pids = self._others | ({} if subject.pid is None else {"proxy": subject.pid})
        busy, before, since = machine_busy_s(), {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        clients = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "proxy_load.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await clients.communicate(json.dumps(plan).encode())
        result = json.loads(told)
        elapsed = time.monotonic() - since
        spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()} | {"clients": result["cpu_s"]}
        spent["others"] = max(machine_busy_s() - busy - sum(spent.values()), 0.0)
        if result["failures"]:
            raise SystemExit(f"{subject.name}, {load}: {len(result['failures'])} failed: {result['failures'][0]}")
        subject.asked += calls
        engine = {one[0]: one[1:] for one in json.loads(await asyncio.to_thread(get, self.url("/times")))}
        first, end = [], []
        for number, sent, client_first, client_end in result["calls"]:
            came, engine_first, engine_end = engine[number]
            first.append(came - sent + client_first - engine_first)
            end.append(came - sent + client_end - engine_end)
        cores = {name: one / elapsed for name, one in spent.items()}
        return Figures(first, end, result["ended"] - result["began"], calls, spent.get("proxy", 0.0), cores)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.engine_port}{path}"

    async def run(self, extent: Extent) -> None:
        warm_up = Load(8, "2 KB", FEWEST, 16, 16)  # lazy imports
        for subject in self.subjects:
            await self.measure(subject, warm_up, warm_up.calls)
        for number in range(extent.rounds):
            for load in extent.loads:
                sys.stderr.write(f"round {number + 1} of {extent.rounds}, load {os.getloadavg()[0]:.1f}: {load}\n")
                for subject in self.subjects:
                    calls = load.slow_calls if subject.slow else load.calls
                    if calls and (load not in extent.dialects or subject.signs):
                        subject.figures.setdefault(load, []).append(
                            await self.measure(subject, load, calls, extent.spread_s)
                        )
            for subject in self.subjects:
                if subject.pid is not None:
                    load = extent.saturated_slow if subject.slow else extent.saturated
                    subject.figures.setdefault(load, []).append(
                        await self.measure(subject, load, load.calls, extent.spread_s)
                    )


# who is asked -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def polar(name: str, engine: str, kafka: BusSettings, scratch: Path, tree: Path | None) -> AsyncIterator[Subject]:
    """`polar serve proxy`; of another checkout where `tree` names one."""
    port = free_port()
    env = {key: value for key, value in os.environ.items() if not key.startswith("POLAR_")} | {
        "POLAR_STATE_DIR": str(scratch / "state"),
        "POLAR_TOKEN_SECRET": SECRET,
        "POLAR_LOG_LEVEL": "warning",
        "POLAR_KAFKA_BOOTSTRAP": kafka.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": kafka.topic_prefix,
        "POLAR_KAFKA_BLOB_URL": kafka.blob_url,
        "POLAR_PROXY_ENGINE_URLS": engine,
        "POLAR_PROXY_PORT": str(port),
        "POLAR_PROXY_LOGPROBS_MODE": "processed_logprobs",
    }
    if tree is not None:
        env["PYTHONPATH"] = ":".join(str(tree / part) for part in ("schemas", "libs", "services/proxy"))
    log = scratch / f"{name}.log"
    start = "from polar.cli.main import main; main()"
    async with process(sys.executable, "-c", start, "serve", "proxy", log=log, env=env) as pid:
        await answers(f"http://127.0.0.1:{port}/ready", pid, log)
        yield Subject(name, port, pid, signs=True, settings=kafka)


def litellm_python(venv: Path) -> Path:
    """LiteLLM's proxy in an environment of its own, made where it is missing."""
    python = venv / "bin" / "python"
    if not (venv / "bin" / "litellm").exists():
        sys.stderr.write(f"installing {LITELLM}\n")
        if uv := shutil.which("uv"):
            subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
            subprocess.run([uv, "pip", "install", "-q", "--python", python, LITELLM], check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", LITELLM], check=True)
    return python


def version_of(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@asynccontextmanager
async def litellm(engine: str, venv: Path, scratch: Path) -> AsyncIterator[Subject]:
    """One worker, no database, no callbacks, its production mode."""
    port = free_port()
    model = {"model": "hosted_vllm/policy", "api_base": engine, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "policy", "litellm_params": model}],
        "general_settings": {"master_key": MASTER_KEY},
    }
    (scratch / "litellm.yaml").write_text(json.dumps(config))
    env = os.environ | {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    log = scratch / "litellm.log"
    options = f"--config litellm.yaml --host 127.0.0.1 --port {port} --num_workers 1 --telemetry False".split()
    async with process(str(venv / "bin" / "litellm"), *options, log=log, env=env) as pid:
        await answers(f"http://127.0.0.1:{port}/health/liveliness", pid, log)
        yield Subject("LiteLLM", port, pid, slow=True)


@asynccontextmanager
async def topics(bootstrap: str, scratch: Path) -> AsyncIterator[BusSettings]:
    """Settings with topics of their own, which are deleted afterwards."""
    settings = BusSettings(
        bootstrap=bootstrap,
        topic_prefix=f"benchmark-{uuid4().hex[:8]}.",
        blob_url=(scratch / "blobs").as_uri(),
    )
    yield settings
    async with Bus(settings, Service.USER) as bus:
        admin = await bus.clients.admin()
        try:
            names = [one for one in await admin.list_topics() if one.startswith(settings.topic_prefix)]
            await admin.delete_topics(names)
        finally:
            await stop_admin(admin)


async def captured(settings: BusSettings) -> int:
    """Complete captures on the log."""
    async with Bus(settings, Service.BUILDER) as bus:
        reader = await bus.reader(["completions"])
        try:
            return len(
                {
                    record.value.completion_id
                    async for record in reader.to_end()
                    if isinstance(record.value, CompletionCaptured) and record.value.complete
                }
            )
        finally:
            await reader.close()


# what is told -------------------------------------------------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(round(share * (len(ordered) - 1)), len(ordered) - 1)]


def median(values: list[float]) -> float:
    return statistics.median(values)


def added(subject: Subject, direct: Subject, load: Load, what: str, share: float) -> float:
    """Milliseconds beyond no proxy: the median over the rounds of the differences at a percentile."""
    pairs = zip(subject.figures[load], direct.figures[load], strict=True)
    return 1e3 * median(
        [percentile(getattr(one, what), share) - percentile(getattr(other, what), share) for one, other in pairs]
    )


def cpu_ms(subject: Subject, load: Load) -> float:
    return 1e3 * median([one.cpu / one.calls for one in subject.figures[load]])


def latency_table(bench: Bench, extent: Extent) -> list[str]:
    direct, *proxies = bench.subjects
    lines = [
        "| open calls | prompt | proxy | first token, added p50 / p99 | end, added p50 / p99 | proxy's CPU a call "
        "| cores: proxy, engine, clients, broker, everything else |",
        "|---:|---|---|---:|---:|---:|---|",
    ]
    for load in extent.latency:
        for subject in proxies:
            first = " / ".join(f"{added(subject, direct, load, 'first', share):.1f}" for share in (0.5, 0.99))
            end = " / ".join(f"{added(subject, direct, load, 'end', share):.1f}" for share in (0.5, 0.99))
            used = [
                f"{median([one.cores[name] for one in subject.figures[load]]):.2f}"
                if name in subject.figures[load][0].cores
                else "?"
                for name in ("proxy", "engine", "clients", "broker", "others")
            ]
            cells = f"{subject.name} | {first} ms | {end} ms | {cpu_ms(subject, load):.1f} ms | {', '.join(used)}"
            lines.append(f"| {load.open} | {load.prompt} | {cells} |")
    return lines


def cpu_table(bench: Bench, extent: Extent) -> list[str]:
    proxies = bench.subjects[1:]
    lines = [f"| CPU | {' | '.join(one.name for one in proxies)} |", "|---|" + "---:|" * len(proxies)]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for prompt, (many, few) in extent.per_token.items():
        row(f"a call of {many.tokens} tokens, {prompt}, ms", [f"{cpu_ms(one, many):.1f}" for one in proxies])
        row(f"a call of {few.tokens} tokens, {prompt}, ms", [f"{cpu_ms(one, few):.2f}" for one in proxies])
        each = [1e3 * (cpu_ms(one, many) - cpu_ms(one, few)) / (many.tokens - few.tokens) for one in proxies]
        row(f"a streamed token, {prompt}, µs", [f"{one:.0f}" for one in each])
    for load in extent.dialects:
        cells = [f"{cpu_ms(one, load):.1f}" if load in one.figures else "" for one in proxies]
        row(f"a call of {load.tokens} tokens, {load.prompt}, {load.dialect}, ms", cells)
    full = [one.figures[extent.saturated_slow if one.slow else extent.saturated] for one in proxies]
    row("saturated: calls a second", [f"{median([one.calls / one.took for one in each]):.1f}" for each in full])
    row(
        "saturated: cores that the proxy used", [f"{median([one.cores['proxy'] for one in each]):.2f}" for each in full]
    )
    row("saturated: calls a second and core", [f"{median([one.calls / one.cpu for one in each]):.1f}" for each in full])
    row("memory at the end, MB", [f"{memory_mb(one.pid):.0f}" for one in proxies if one.pid is not None])
    return lines


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}"


def versions(venv: Path | None) -> str:
    ours = ", ".join(f"{name} {version_of(Path(sys.executable), name)}" for name in FROM_PACKAGES)
    if venv is None:
        return ours
    python = litellm_python(venv)
    theirs = f"LiteLLM {version_of(python, 'litellm')} (Python {version_of_python(python)}, one worker, no database)"
    return f"{theirs}; Polar's {ours}"


def version_of_python(python: Path) -> str:
    return subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]


async def run(options: argparse.Namespace, scratch: Path) -> None:
    extent = quick() if options.quick else whole(options.rounds)
    venv = None if options.no_litellm else (options.litellm or scratch / "litellm").resolve()
    about = f"{machine()}; {await asyncio.to_thread(versions, venv)}"
    load_before = os.getloadavg()[0]
    async with AsyncExitStack() as stack:
        if options.kafka:
            bootstrap, broker_pid, broker = options.kafka, None, f"Apache Kafka at {options.kafka}"
        else:
            started = await stack.enter_async_context(await spawn(scratch / "broker"))
            bootstrap, broker_pid, broker = started.bootstrap, started.pid, "the embedded broker"
        log, port = scratch / "engine.log", free_port()
        command = (sys.executable, str(HERE / "proxy_stub.py"), "--port", str(port))
        bench = Bench(port, await stack.enter_async_context(process(*command, log=log)), broker_pid)
        await answers(bench.url("/version"), bench.engine_pid, log)
        bench.subjects.append(Subject("none", bench.engine_port, None))
        trees = {"Polar": None} | ({} if options.against is None else {"Polar, other checkout": options.against})
        for name, tree in trees.items():
            settings = await stack.enter_async_context(topics(bootstrap, scratch))
            one = polar(name, bench.url("/v1"), settings, scratch, tree)
            bench.subjects.append(await stack.enter_async_context(one))
        if venv is not None:
            bench.subjects.append(await stack.enter_async_context(litellm(bench.url("/v1"), venv, scratch)))
        await bench.run(extent)
        print(f"{about}; load average {load_before:.1f} before the run, {os.getloadavg()[0]:.1f} after it.")
        print(f"Captures go to {broker}; {extent.rounds} rounds in turns, medians of the rounds.\n")
        print("\n".join([*latency_table(bench, extent), "", *cpu_table(bench, extent), ""]))
        for subject in bench.subjects:
            if subject.settings is not None:
                print(f"{subject.name}: {subject.asked} calls, {await captured(subject.settings)} captures on the log.")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the proxy adds to a streamed call, beside LiteLLM's.")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default: 3)")
    parser.add_argument("--kafka", metavar="HOST:PORT", default=os.environ.get("KAFKA_BOOTSTRAP"), help="Apache Kafka")
    parser.add_argument("--litellm", metavar="VENV", type=Path, help="LiteLLM's environment; made where it is missing")
    parser.add_argument("--no-litellm", action="store_true", help="without LiteLLM")
    parser.add_argument("--against", metavar="CHECKOUT", type=Path, help="another checkout, whose proxy is asked too")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        uvloop.run(run(options, Path(scratch)))
    sys.stderr.write(f"took {time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
