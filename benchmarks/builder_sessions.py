"""Sessions of a coding agent, as the proxy writes them, made up and the same for the same seed.

A main conversation with tools (system prompt, task, replies with tool calls that hold code, tool results), a title
beside it, and sub-agents now and then. A synthetic tokenizer has 40,000 pieces of text, drawn by Zipf's law; a template
puts ids around messages. Every so many replies hold ids that the template renders otherwise later. Prompts are written
as deltas by `polar.schemas.prompts`, as the proxy does, or whole.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polar.schemas import (
    Budgets,
    BuilderSpec,
    CallStarted,
    Choice,
    CompletionCaptured,
    Engine,
    EvaluatorSpec,
    Event,
    Logprobs,
    LogprobsMode,
    Outcome,
    PolicySpan,
    Prompt,
    RecordRef,
    Sampling,
    SessionClosed,
    SessionOpened,
    Status,
    TokenIds,
    encode,
    sha256,
)
from polar.schemas.prompts import Captured, delta

BEGIN, END, NEWLINE, CALL = 1, 2, 3, 4
ROLES = {"system": 5, "user": 6, "assistant": 7, "tool": 8}
FIRST_PIECE = 16
PIECES = 40_000
PIECE_CHARACTERS = (1, 8)
SYSTEM_TOKENS, TASK_TOKENS, TOOLS, TOOL_TOKENS = 1_800, 400, 8, 60
REPLY_MEDIAN, REPLY_SPREAD, REPLY_MOST = 110, 0.8, 900
RESULT_SPREAD = 0.9
DRIFT_EACH = 17
"""Every so many replies of a conversation are sampled as other ids than the template renders."""
SUBAGENT_EACH, SUBAGENT_CALLS = 25, 4
STARTED_MS = 1_790_000_000_000

Ids = npt.NDArray[np.int32]


class Made(NamedTuple):
    """What a session's file holds."""

    calls: int
    unique: int
    """Token ids: of each prompt, those after what it begins alike with the call before it in its conversation, and all
    sampled ones."""
    given: int
    """Token ids: of all whole prompts and replies."""
    size: int
    """Bytes of its records."""


class Text(NamedTuple):
    ids: Ids
    text: str


class Tokenizer:
    """Draws text by the token. Ids are pieces of letters, many with a space or a line break before them."""

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.default_rng(seed)
        chance = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgk_.(){}=:"
        self._pieces = []
        for _ in range(PIECES):
            length = chance.randint(*PIECE_CHARACTERS) // 2 + 1
            self._pieces.append(chance.choice(("", " ", " ", "\n")) + "".join(chance.choices(letters, k=length)))
        weight = 1 / np.arange(1, PIECES + 1)
        self._upto = np.cumsum(weight / weight.sum())

    def draw(self, count: int) -> Text:
        places = np.minimum(np.searchsorted(self._upto, self._numbers.random(count)), PIECES - 1)
        text = "".join(self._pieces[place] for place in places.tolist())
        return Text((places + FIRST_PIECE).astype(np.int32), text)

    def logprobs(self, count: int) -> Logprobs:
        return Logprobs((-self._numbers.exponential(0.4, count)).astype(np.float32))


@dataclass
class Conversation:
    """One list of messages, with the template's rendering of it."""

    tools: list[dict[str, Any]] | None
    ids: list[Ids] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    before: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and reply of its last call."""

    def say(self, message: dict[str, Any], body: Ids) -> None:
        self.messages.append(message)
        self.ids += [_ids(BEGIN, ROLES[message["role"]], NEWLINE), body, _ids(END, NEWLINE)]

    def prompt(self) -> Ids:
        return np.concatenate([*self.ids, _ids(BEGIN, ROLES["assistant"], NEWLINE)])


class Session:
    """Writes one session's records to a file."""

    def __init__(
        self, calls: int, tokens: int, *, whole: bool, strategy: str = "prefix_merging", seed: int = 1
    ) -> None:
        """`calls`: in all; `tokens`: unique ones, about."""
        self._calls, self._tokens, self._whole, self._strategy = calls, tokens, whole, strategy
        self._chance = random.Random(seed)
        self._tokenizer = Tokenizer(seed)
        self._history: list[Captured] = []
        self._made = 0
        self._unique = self._given = self._size = self._offset = 0

    def write(self, path: Path) -> Made:
        with path.open("wb") as file:
            for event in self._events():
                value = encode(event)
                file.write(len(value).to_bytes(4, "little"))
                file.write(value)
                self._size += len(value)
                self._offset += 1
        return Made(self._made, self._unique, self._given, self._size)

    def _events(self) -> Iterator[Event]:
        yield SessionOpened(
            session_id="session",
            task_id="task",
            group_id="group",
            sample=0,
            num_samples=8,
            source=RecordRef(topic="tasks", partition=0, offset=0),
            harness="claude_code",
            builder=BuilderSpec(strategy=self._strategy),
            evaluator=EvaluatorSpec(),
            budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
            at_ms=STARTED_MS,
        )
        tools = self._tools()
        main = self._conversation(SYSTEM_TOKENS, self._tokenizer.draw(TASK_TOKENS), tools)
        title = self._conversation(80, self._tokenizer.draw(60), None)
        yield from self._call(title, self._tokenizer.draw(8), None)
        turn = 0
        while self._made < self._calls:
            turn += 1
            if turn % SUBAGENT_EACH == 0 and self._made + SUBAGENT_CALLS + 1 < self._calls:
                task = self._tokenizer.draw(80)
                yield from self._call(main, self._tokenizer.draw(30), ("task", {"prompt": task.text}, task.ids))
                helper = self._conversation(300, task, tools[:4])
                for step in range(SUBAGENT_CALLS):
                    last = step == SUBAGENT_CALLS - 1
                    yield from self._turn(helper, step + 1, call=not last)
                    if not last:
                        self._result(helper)
                found = self._tokenizer.draw(120)
                main.say({"role": "tool", "tool_call_id": self._call_id(), "content": found.text}, found.ids)
                continue
            last = self._made == self._calls - 1
            yield from self._turn(main, turn, call=not last)
            if not last:
                self._result(main)
        closed = Outcome(status=Status.COMPLETED)
        yield SessionClosed(session_id="session", attempt=1, outcome=closed, at_ms=STARTED_MS)

    def _conversation(self, system: int, task: Text, tools: list[dict[str, Any]] | None) -> Conversation:
        found = Conversation(tools)
        if tools:
            found.ids.append(self._tokenizer.draw(TOOL_TOKENS * len(tools)).ids)
        said = self._tokenizer.draw(system)
        found.say({"role": "system", "content": said.text}, said.ids)
        found.say({"role": "user", "content": task.text}, task.ids)
        return found

    def _tools(self) -> list[dict[str, Any]]:
        properties = {"path": {"type": "string"}, "text": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        found = []
        for number in range(TOOLS):
            text = self._tokenizer.draw(TOOL_TOKENS).text
            function = {"name": f"tool_{number}", "description": text, "parameters": parameters}
            found.append({"type": "function", "function": function})
        return found

    def _turn(self, conversation: Conversation, turn: int, *, call: bool) -> Iterator[Event]:
        length = int(min(max(REPLY_MEDIAN * self._chance.lognormvariate(0, REPLY_SPREAD), 24), REPLY_MOST))
        code = self._tokenizer.draw(length - length // 3)
        given = ("tool_1", {"path": f"src/module_{turn}.py", "text": code.text}, code.ids) if call else None
        said = self._tokenizer.draw(length // 3)
        yield from self._call(conversation, said, given, drift=turn % DRIFT_EACH == DRIFT_EACH - 1)

    def _result(self, conversation: Conversation) -> None:
        """As long as the session has room for, on average."""
        left = (self._tokens - self._unique) / max(1, self._calls - self._made) - REPLY_MEDIAN * 1.4
        mean = self._chance.lognormvariate(-(RESULT_SPREAD**2) / 2, RESULT_SPREAD)
        result = self._tokenizer.draw(max(8, int(left * mean)))
        message = {"role": "tool", "tool_call_id": self._call_id(), "content": result.text}
        conversation.say(message, result.ids)

    def _call_id(self) -> str:
        return f"call_{self._made:08d}"

    def _call(
        self,
        conversation: Conversation,
        said: Text,
        call: tuple[str, dict[str, str], Ids] | None,
        *,
        drift: bool = False,
    ) -> Iterator[Event]:
        """One call of the model, with its reply put into the conversation."""
        ids = conversation.prompt()
        self._made += 1
        name = f"01990000-0000-7000-8000-{self._made:012d}"
        yield CallStarted(
            completion_id=name,
            session_id="session",
            attempt=1,
            call=self._made,
            dialect="anthropic.messages",
            at_ms=STARTED_MS + self._made * 3_000,
        )
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        body = said.ids
        if call is not None:
            function, arguments, argument_ids = call
            told = {"name": function, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": self._call_id(), "type": "function", "function": told}]
            body = np.concatenate([said.ids, _ids(CALL), argument_ids])
        sampled = body
        if drift:
            at = len(body) // 2
            sampled = np.concatenate([body[:at], _ids(FIRST_PIECE + 5, FIRST_PIECE + 7), body[at + 1 :]])
        sampled = np.concatenate([sampled, _ids(END)])
        captured = self._captured(name, conversation, ids, message, sampled)
        yield captured
        conversation.say(message, body)

    def _captured(
        self, name: str, conversation: Conversation, ids: Ids, message: dict[str, Any], sampled: Ids
    ) -> CompletionCaptured:
        tools = conversation.tools
        prompt = Prompt(
            ids=TokenIds(ids),
            messages=list(conversation.messages),
            tools=tools,
            tools_sha256=None if tools is None else sha256(tools),
        )
        choice = Choice(
            ids=TokenIds(sampled),
            logprobs=self._tokenizer.logprobs(len(sampled)),
            message=message,
            finish="tool_calls" if "tool_calls" in message else "stop",
            spans=[PolicySpan(start=0, end=len(sampled), version="step-41", exact=True)],
        )
        if not self._whole:
            draft = delta(prompt, self._history)
            prompt = draft.prompt
            self._history.append(draft.captured(name, self._offset, [choice]))
        self._unique += len(ids) - _alike(conversation.before, ids) + len(sampled)
        self._given += len(ids) + len(sampled)
        conversation.before = np.concatenate([ids, sampled])
        started = STARTED_MS + self._made * 3_000
        sampling = Sampling(
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=32_000,
            seed=self._made,
            n=1,
        )
        return CompletionCaptured(
            completion_id=name,
            session_id="session",
            attempt=1,
            task_id="task",
            group_id="group",
            sample=0,
            call=self._made,
            started_ms=started,
            first_token_ms=started + 80,
            ended_ms=started + 2_000,
            dialect="anthropic.messages",
            streamed=True,
            harness="claude_code",
            request_sha256=f"{self._made:064x}",
            prompt=prompt,
            choices=[choice],
            sampling_asked=Sampling(max_tokens=32_000),
            sampling=sampling,
            engine=Engine(
                model="policy",
                endpoint="http://127.0.0.1:8000",
                build="0.32.0",
                tokenizer_sha256="a" * 64,
                template_sha256="b" * 64,
                logprobs_mode=LogprobsMode.PROCESSED,
            ),
            usage={"prompt_tokens": len(ids), "completion_tokens": len(sampled)},
            context_kind="append",
            drift=0,
        )


def values(path: Path) -> Iterator[bytes]:
    """The records of a session's file, as they stand on the log."""
    with path.open("rb", buffering=2**18) as file:
        while head := file.read(4):
            yield file.read(int.from_bytes(head, "little"))


def _ids(*ids: int) -> Ids:
    return np.array(ids, np.int32)


def _alike(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
