"""A script for the scripted engine: rules matched in order, each with the replies it gives.

Plain data, readable from JSON (`Script.read`) or written in Python, where a match or a reply may also be a function.
Nothing here is asynchronous and nothing samples: `Script.reply` is called once per request with a `View` of it.

    {"key": "first_user",
     "rules": [{"name": "weather", "match": {"last_user": "weather in (\\\\w+)", "turn": 1},
                "replies": [{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}]},
               {"match": {"last_role": "tool"}, "reply": {"text": "It is sunny."}}],
     "default": {"texts": ["First answer.", "Second answer."]}}

Every field of `Match` that is set must hold. A rule's n-th hit gives its n-th reply; the last one repeats, or after
`times` hits the rule is passed over.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

Json = dict[str, Any]
DEFAULT_TEXTS = (
    "I have looked at this and here is what I found.",
    "Let me think about it. The answer depends on the question.",
    "Done. Nothing else is needed.",
    "That is a good question, and the short answer is yes.",
    "I could not find it, so I will try another way.",
)


@dataclass(frozen=True, slots=True)
class View:
    """What a script sees of a request. `turn` is 1 + the assistant's messages so far; `call` counts the key's calls."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    prompt_ids: Sequence[int]
    key: str
    call: int
    turn: int

    @property
    def messages(self) -> list[Json]:
        return list(self.body.get("messages") or [])

    def text(self, role: str, *, first: bool = False) -> str:
        """The text of the last (or first) message of `role`, empty when there is none."""
        found = [message for message in self.messages if message.get("role") == role]
        return content_text(found[0 if first else -1].get("content")) if found else ""

    @property
    def last_role(self) -> str:
        return str(self.messages[-1].get("role")) if self.messages else ""


def content_text(content: object) -> str:
    """The text of a message's content, parts joined by newlines."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Conditions on a request; the texts are regular expressions, searched."""

    last_user: str | None = None
    last_message: str | None = None
    last_role: str | None = None
    system: str | None = None
    any_message: str | None = None
    model: str | None = None
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    call: int | None = None
    turn: int | None = None
    tools: bool | None = None
    """Whether the request offers tools."""
    tool: str | None = None
    """The name of a tool that it offers."""
    stream: bool | None = None

    def __call__(self, view: View) -> bool:
        messages, body = view.messages, view.body
        offered = [tool.get("function", {}).get("name") for tool in body.get("tools") or []]
        last = content_text(messages[-1].get("content")) if messages else ""
        texts = (
            (self.last_user, view.text("user")),
            (self.last_message, last),
            (self.system, view.text("system", first=True)),
            (self.model, str(body.get("model") or "")),
            (self.key, view.key),
            *((pattern, view.headers.get(name, "")) for name, pattern in self.headers.items()),
        )
        everything = (content_text(message.get("content")) for message in messages)
        return (
            all(pattern is None or re.search(pattern, text) for pattern, text in texts)
            and self.last_role in (None, view.last_role)
            and (self.any_message is None or any(re.search(self.any_message, text) for text in everything))
            and self.call in (None, view.call)
            and self.turn in (None, view.turn)
            and self.tools in (None, bool(offered))
            and (self.tool is None or self.tool in offered)
            and self.stream in (None, bool(body.get("stream")))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error answer: over HTTP before anything was sent, or inside the stream after `after` tokens."""

    status: int = 500
    message: str = "scripted failure"
    type: str = "InternalServerError"
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. What is not set is as a healthy vLLM would do it. Delays are in seconds."""

    text: str = ""
    texts: Sequence[str] = ()
    """Instead of `text`: one is chosen by a hash of prompt ids and seed."""
    template: bool = False
    """Fill `$call`, `$turn`, `$key`, `$last_user` in the text."""
    reasoning: str | None = None
    """Thinking before the text, as `<think>` in the tokens; the engine parses it only with `reasoning=True`."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls `{name, arguments}`, arguments as object or as the exact JSON text; in the tokens in hermes form."""
    ids: Sequence[int] | None = None
    """Exactly these ids, instead of all of the above; an end-of-turn token must be among them to end with `stop`."""
    drift: bool | int = False
    """Split that many tokens (true: one) into two that decode to the same text: ids that encoding would not give."""
    finish: str = "stop"
    """`stop` samples the end-of-turn token last; `length`, `abort`, `repetition`, `error` end without one."""
    stop_reason: int | str | None = None
    logprob: float | None = None
    """The same log-probability for every token, instead of the made up ones."""
    tokens_per_chunk: int = 1
    delay: float = 0.0
    """Before the headers."""
    first_delay: float = 0.0
    """Between headers and first token."""
    chunk_delay: float = 0.0
    """Between chunks."""
    gate: str | None = None
    """Wait for the gate of this name (`ScriptedEngine.open`), after `gate_after` tokens (0: before the headers)."""
    gate_after: int = 0
    error: Failure | None = None
    disconnect_after: int | None = None
    """Cut the connection after that many tokens (0: before the headers)."""
    reset: bool = False
    """Cut with a reset instead of an orderly end."""
    versions: Sequence[tuple[str, int]] = ()
    """Weight versions as (version, number of tokens); the last one goes on to the end."""
    damage: str | None = None
    """Send something no proxy may accept; one of `DAMAGES` in `tamper.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A match and its replies."""

    match: Callable[[View], bool] = Match()
    replies: Sequence[Reply | Callable[[View], Reply]] = (Reply(texts=DEFAULT_TEXTS),)
    name: str = ""
    times: int | None = None


class Script:
    """Rules and what was already given: a script keeps counts, so use one per engine.

    `key` says how calls are counted: `first_user` (a conversation), `all`, `model`, `user` (the request's field), or
    `header:<name>`.
    """

    def __init__(self, rules: Sequence[Rule] = (), *, default: Reply | None = None, key: str = "first_user") -> None:
        self.rules = tuple(rules)
        self.default = default or Reply(texts=DEFAULT_TEXTS)
        self._key = key
        self._calls: Counter[str] = Counter()
        self._hits: Counter[int] = Counter()

    @classmethod
    def say(cls, *texts: str) -> "Script":
        """A script that answers with these texts in order, whoever asks; the last one repeats."""
        return cls([Rule(name="say", replies=[Reply(text=text) for text in texts])])

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Script":
        """A script from JSON data. Raises `ValueError` naming an unknown field."""
        unknown = set(data) - {"rules", "default", "key"}
        if unknown:
            raise ValueError(f"a script has rules, default and key, not {', '.join(sorted(unknown))}")
        rules = [_rule(entry) for entry in data.get("rules", [])]
        default = _reply(data["default"]) if "default" in data else None
        return cls(rules, default=default, key=data.get("key", "first_user"))

    @classmethod
    def read(cls, path: str | Path) -> "Script":
        """A script from a JSON file."""
        return cls.parse(json.loads(Path(path).read_text(encoding="utf-8")))

    def forget(self) -> None:
        """Forget what was given so far."""
        self._calls.clear()
        self._hits.clear()

    def view(self, body: Mapping[str, Any], headers: Mapping[str, str], prompt_ids: Sequence[int]) -> View:
        """Count the request and describe it."""
        blank = View(body, headers, prompt_ids, "", 0, 0)
        key = self._key_of(blank)
        self._calls[key] += 1
        turn = 1 + sum(message.get("role") == "assistant" for message in blank.messages)
        return View(body, headers, prompt_ids, key, self._calls[key], turn)

    def reply(self, view: View) -> tuple[str, Reply]:
        """The name of the rule that matched (its number, or `default`) and its reply, ready to be told."""
        for number, rule in enumerate(self.rules):
            hits = self._hits[number]
            if (rule.times is not None and hits >= rule.times) or not rule.match(view):
                continue
            self._hits[number] += 1
            reply = rule.replies[min(hits, len(rule.replies) - 1)]
            return rule.name or str(number), reply if isinstance(reply, Reply) else reply(view)
        return "default", self.default

    def _key_of(self, view: View) -> str:
        if self._key == "first_user":
            return view.text("user", first=True)
        if self._key.startswith("header:"):
            return view.headers.get(self._key.removeprefix("header:"), "")
        return "" if self._key == "all" else str(view.body.get(self._key, ""))


def reply_text(reply: Reply, view: View, seed: int) -> str:
    """The text whose tokens the reply samples: reasoning, text and calls, as a model would write them."""
    text = reply.texts[digest(view.prompt_ids, seed) % len(reply.texts)] if reply.texts else reply.text
    if reply.template:
        known = {"call": view.call, "turn": view.turn, "key": view.key, "last_user": view.text("user")}
        text = Template(text).safe_substitute(known)
    calls = []
    for call in reply.tool_calls:
        arguments = call.get("arguments", {})
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(call["name"], ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {shown}}}\n</tool_call>')
    whole = "\n".join([text, *calls] if text else calls)
    return whole if reply.reasoning is None else f"<think>\n{reply.reasoning}\n</think>\n\n{whole}"


def digest(ids: Sequence[int], seed: int = 0) -> int:
    """64 bits that depend on every id and the seed, the same on every machine."""
    raw = b"".join(number.to_bytes(4, "little") for number in ids)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=seed.to_bytes(9, "little", signed=True)).digest())


def _build(kind: type[Any], data: Mapping[str, Any]) -> Any:
    known = {entry.name for entry in fields(kind)}
    if unknown := set(data) - known:
        raise ValueError(
            f"{kind.__name__} has no field {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    return kind(**data)


def _reply(data: Mapping[str, Any]) -> Reply:
    plain = dict(data)
    if isinstance(plain.get("error"), Mapping):
        plain["error"] = _build(Failure, plain["error"])
    reply: Reply = _build(Reply, plain)
    return reply


def _rule(data: Mapping[str, Any]) -> Rule:
    plain = dict(data)
    if "reply" in plain:
        plain["replies"] = [plain.pop("reply")]
    if "replies" in plain:
        if not plain["replies"]:
            raise ValueError("a rule needs at least one reply")
        plain["replies"] = [_reply(reply) for reply in plain["replies"]]
    if "match" in plain:
        plain["match"] = _build(Match, plain["match"])
    rule: Rule = _build(Rule, plain)
    return rule
