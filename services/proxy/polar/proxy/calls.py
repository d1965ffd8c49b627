"""A model call between the dialects: what is asked (`Call`), what streams back (`Delta`), what it came to (`Reply`).

Plain data. A dialect makes a `Call` of its request and a body of a `Reply`; nothing here knows a dialect, HTTP or
Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polar.schemas import Logprobs, Sampling, TokenIds

Json = dict[str, Any]


class Entry(msgspec.Struct, frozen=True):
    """One token's log-probability as the engine tells it, kept for clients that ask for log-probabilities."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Entry] | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image or the like of a request, in the order in which the prompt shows them."""

    kind: str
    sha256: str
    """Of the decoded bytes; of the address where only that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generation as asked, normalized. `extras` go to the engine as they are."""

    dialect: str
    model: str
    """As the client names it; told back to it, never sent."""
    messages: list[Json]
    """OpenAI Chat form: one text part is a string, no cache marks, no nulls."""
    tools: list[Json] | None = None
    extras: Json = field(default_factory=dict)
    asked: Sampling
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    constraints: tuple[str, ...] = ()
    """What the request itself forces or masks, e.g. `grammar`; penalties are added once sampling is resolved."""
    unknown: int = 0
    """Fields of the request that were passed over."""
    media: tuple[Media, ...] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    """What the body says of its client, by the names of `ClientHints`; headers win."""
    dropped: tuple[str, ...] = ()
    """Kinds of what only a provider could make use of, and that was left out."""
    hide_thinking: bool = False
    """The client asked not to be shown the model's thinking."""
    details: object = None
    """What its dialect needs again for the reply; nobody else looks at it."""

    @property
    def turns(self) -> int:
        """Replies in its history."""
        return sum(message["role"] == "assistant" for message in self.messages)


class ToolDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call. `id` and `name` come with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk adds to one choice. Ids and log-probabilities stay behind in the `Answer`.

    A struct, since there is one for each token: it is made in a sixth of a frozen dataclass's time.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tools: Sequence[ToolDelta] = ()
    entries: Sequence[Entry] = ()

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.tools or self.entries)


@dataclass(frozen=True, slots=True)
class Version:
    """`version` sampled the tokens from `start` to `end` (exclusive), in the engine's own word."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyChoice:
    """One sampled reply; `ids` and `logprobs` have the same length."""

    index: int
    ids: TokenIds
    logprobs: Logprobs
    message: Json
    """OpenAI Chat form: role, content, and reasoning and tool_calls where there are any."""
    finish: str | None
    stop: int | str | None
    versions: Sequence[Version] = ()
    entries: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The whole answer, checked. `usage`: token counts by name."""

    prompt_ids: TokenIds
    choices: Sequence[ReplyChoice]
    usage: dict[str, int]
    fingerprint: str | None = None

    def deltas(self) -> list[Delta]:
        """The reply as one delta per choice and kind, in the order in which a stream tells them."""
        found = []
        for choice in self.choices:
            calls = [
                ToolDelta(i, call["id"], call["function"]["name"], call["function"]["arguments"])
                for i, call in enumerate(choice.message.get("tool_calls", ()))
            ]
            reasoning, content = choice.message.get("reasoning") or "", choice.message.get("content") or ""
            found += [Delta(index=choice.index, reasoning=reasoning)] if reasoning else []
            found += [Delta(index=choice.index, content=content)] if content else []
            found += [Delta(index=choice.index, tools=[call]) for call in calls]
            found += [Delta(index=choice.index, entries=choice.entries)] if choice.entries else []
        return found
