"""A toy tokenizer and chat template, and a harness that writes sessions with the true generation record kept beside.

The tokenizer has pieces of one to three letters: `canonical` takes the longest, `spelled` any, so that text and back
gives other ids for the same text, as real ones do. Ids below `FIRST_PIECE` are control tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from polar.builder import Entry
from polar.schemas import (
    AttemptFenced,
    Budgets,
    BuilderSpec,
    CallStarted,
    Choice,
    Claim,
    ClientHints,
    CompletionCaptured,
    CompletionFailed,
    Engine,
    EvaluatorSpec,
    Event,
    Failure,
    FailureKind,
    Logprobs,
    LogprobsMode,
    MediaPart,
    Outcome,
    PolicySpan,
    Prompt,
    RecordRef,
    Sampling,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Status,
    TokenIds,
    sha256,
)
from polar.schemas.prompts import MAX_CHAIN, Captured, delta

BEGIN, END, NEWLINE = 1, 2, 3
ROLES = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
FIRST_PIECE = 10
ALPHABET = 'abcdefgh {}":,0123456789'
PIECES = [
    *ALPHABET,
    *(a + b for a, b in itertools.product("abcd ", repeat=2)),
    *(a + b + c for a, b, c in itertools.product("abc", repeat=3)),
]
NUMBER = {piece: FIRST_PIECE + i for i, piece in enumerate(PIECES)}
TEXT = {number: piece for piece, number in NUMBER.items()}
Message = dict[str, Any]


def canonical(text: str) -> list[int]:
    """Always the longest piece."""
    return _cut(text, lambda fitting: fitting[-1])


def spelled(text: str, chance: random.Random) -> list[int]:
    """Any pieces that make the text, as a policy samples them."""
    return _cut(text, chance.choice)


def _cut(text: str, choose: Any) -> list[int]:
    found, at = [], 0
    while at < len(text):
        fitting = [text[at : at + n] for n in (1, 2, 3) if text[at : at + n] in NUMBER and at + n <= len(text)]
        piece = choose(fitting)
        found.append(NUMBER[piece])
        at += len(piece)
    return found


def decode(ids: Any) -> str:
    """Text with control tokens written as `<n>`."""
    return "".join(TEXT.get(int(one), f"<{int(one)}>") for one in ids)


def body(message: Message) -> str:
    """What the template shows of a message."""
    calls = "".join(
        json.dumps({"name": one["function"]["name"], "arguments": json.loads(one["function"]["arguments"])})
        for one in message.get("tool_calls") or []
    )
    return (message.get("content") or "") + calls


def render(messages: list[Message], tools: str = "", *, think: bool = True) -> list[int]:
    """The prompt, generation prompt included; `tools` is shown in front."""
    found = canonical(tools)
    for message in messages:
        shown = message if think else {**message, "reasoning": None}
        text = (shown.get("reasoning") or "") + body(shown)
        found += [BEGIN, ROLES[message["role"]], NEWLINE, *canonical(text), END, NEWLINE]
    return [*found, BEGIN, ROLES["assistant"], NEWLINE]


@dataclass
class Truth:
    """What the engine really did in one choice of one call."""

    completion_id: str
    choice: int
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    attempt: int
    version: str


@dataclass
class Reply:
    """What the policy says: ids and the message the engine makes of them."""

    ids: list[int]
    message: Message
    finish: str | None = "stop"
    stop: int | str | None = None
    spans: list[PolicySpan] | None = None
    """None: all of it by the session's version."""
    experts: Claim | None = None
    unscored: int | None = None
    """Position of an id without log-probability."""


def say(text: str, chance: random.Random, *, cut: bool = False, exact: bool = False) -> Reply:
    """A reply of `text`; spelled at random unless `exact`; `cut` by the length limit instead of ended."""
    ids = canonical(text) if exact else spelled(text, chance)
    message = {"role": "assistant", "content": text}
    return Reply(ids, message, "length") if cut else Reply([*ids, END], message)


@dataclass
class Session:
    """Writes one session's records, and remembers the truth."""

    seed: int = 0
    builder: BuilderSpec = field(default_factory=BuilderSpec)
    session_id: str = "s-1"
    partition: int = 3
    first_offset: int = 100
    attempt: int = 1
    version: str = "v1"
    delta: bool = False
    """Write prompts against earlier calls, as the proxy does."""
    max_chain: int = MAX_CHAIN
    records: list[Entry] = field(default_factory=list)
    truth: list[Truth] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.offsets = itertools.count(self.first_offset)
        self.numbers = itertools.count()
        self._started_at: dict[str, int] = {}
        self._history: dict[int, list[Captured]] = {}
        self.write(
            SessionOpened(
                session_id=self.session_id,
                task_id="t-1",
                group_id="g-1",
                sample=0,
                num_samples=1,
                source=RecordRef(topic="tasks", partition=0, offset=7),
                harness="shell",
                builder=self.builder,
                evaluator=EvaluatorSpec(),
                metadata={"rollout_step": 3},
                budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
                at_ms=0,
            )
        )

    def write(self, event: Event) -> Entry:
        ref = RecordRef(topic="completions", partition=self.partition, offset=next(self.offsets))
        entry = Entry(ref, event)
        self.records.append(entry)
        return entry

    def start(self) -> str:
        """A call that has begun."""
        call = next(self.numbers)
        name = f"{self.session_id}-c{call}"
        self.started.append(name)
        self._started_at[name] = self.write(
            CallStarted(
                completion_id=name,
                session_id=self.session_id,
                attempt=self.attempt,
                call=call,
                dialect="openai.chat",
                at_ms=call,
            )
        ).ref.offset
        return name

    def fail(self, name: str, kind: FailureKind = FailureKind.PROVIDER) -> None:
        self.write(
            CompletionFailed(
                completion_id=name,
                session_id=self.session_id,
                attempt=self.attempt,
                call=0,
                failure=Failure(kind=kind, message="503"),
                at_ms=0,
            )
        )

    def capture(
        self,
        name: str,
        messages: list[Message],
        *replies: Reply,
        tools: str = "",
        prompt: list[int] | None = None,
        media: Sequence[MediaPart] = (),
        **more: Any,
    ) -> CompletionCaptured:
        ids = render(messages, tools) if prompt is None else prompt
        choices = []
        for index, reply in enumerate(replies):
            logprobs = [-self.chance.random() for _ in reply.ids]
            if reply.unscored is not None:
                logprobs[reply.unscored] = float("nan")
            shown = [float(np.float32(one)) for one in logprobs]
            self.truth.append(Truth(name, index, ids, reply.ids, shown, self.attempt, self.version))
            choices.append(
                Choice(
                    index=index,
                    ids=TokenIds(reply.ids),
                    logprobs=Logprobs(logprobs),
                    message=reply.message,
                    finish=reply.finish,
                    stop=reply.stop,
                    spans=[PolicySpan(start=0, end=len(reply.ids), version=self.version, exact=True)]
                    if reply.spans is None
                    else reply.spans,
                    routed_experts=reply.experts,
                )
            )
        names = tools.split() or [tools]
        listed = [{"type": "function", "function": {"name": one}} for one in names] if tools else None
        fields: dict[str, Any] = {
            "completion_id": name,
            "session_id": self.session_id,
            "attempt": self.attempt,
            "task_id": "t-1",
            "group_id": "g-1",
            "sample": 0,
            "call": 0,
            "started_ms": 10,
            "ended_ms": 20,
            "dialect": "openai.chat",
            "request_sha256": "0" * 64,
            "prompt": Prompt(
                ids=TokenIds(ids),
                messages=list(messages),
                tools=listed,
                tools_sha256=sha256(listed) if listed else None,
                media=list(media),
            ),
            "choices": choices,
            "sampling_asked": Sampling(),
            "sampling": Sampling(temperature=1.0),
            "engine": Engine(model="toy", endpoint="e", logprobs_mode=LogprobsMode.PROCESSED),
            "hints": ClientHints(),
        }
        event = CompletionCaptured(**(fields | more))
        history = self._history.setdefault(self.attempt, [])
        known = [one for one in history if self.delta and one.offset < self._started_at[name]]
        draft = delta(event.prompt, known, max_chain=self.max_chain)
        written = self.write(replace(event, prompt=draft.prompt))
        history.append(draft.captured(name, written.ref.offset, event.choices))
        return event

    def call(self, messages: list[Message], *replies: Reply, **more: Any) -> CompletionCaptured:
        return self.capture(self.start(), messages, *replies, **more)

    def fence(self) -> None:
        failure = Failure(kind=FailureKind.INFRA, message="lost", retryable=True)
        self.write(AttemptFenced(session_id=self.session_id, attempt=self.attempt, failure=failure, at_ms=0))
        self.attempt += 1

    def close(self, outcome: Outcome | None = None) -> None:
        outcome = outcome or Outcome(status=Status.COMPLETED, exit_code=0)
        self.write(SessionClosed(session_id=self.session_id, attempt=self.attempt, outcome=outcome, at_ms=0))

    def final(self) -> None:
        self.write(SessionFinal(session_id=self.session_id, attempt=self.attempt, at_ms=0))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "call"}
