"""What is remembered of an attempt's calls, so that later ones are measured against them and go on from their tokens.

Promises: a look-up costs one hash per message, whatever is remembered; ids are shared with what prompts are written
against (`polar.schemas.prompts.Captured`) and not held twice; nothing is guessed of calls that it does not hold. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from polar.schemas import Choice, CompletionCaptured, TokenIds
from polar.schemas.messages import thinking
from polar.schemas.prompts import Captured, first_choice

from .conversation import Conversation, Digest, digest

Kind = Literal["append", "rewrite", "fresh"]
CUT: Final = frozenset({"length", "abort", "error", "repetition"})
"""Finish reasons of a reply that the policy did not end itself."""
TURN_BYTES: Final = 500
"""What a remembered reply takes beside its ids, about."""


class Canonical(NamedTuple):
    """A prompt as the engine renders it from messages: its length and its digest."""

    length: int
    digest: Digest

    @classmethod
    def of(cls, ids: TokenIds) -> Canonical:
        return cls(len(ids), digest(ids.data))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One sampled reply with its prompt."""

    captured: Captured
    """Holds the ids of prompt and first choice."""
    prompt_length: int
    reply: TokenIds | None
    """Of another choice than the first."""
    tools: Digest
    setting: Digest
    canonical: Canonical | None
    """None: the prompt itself is what the engine rendered."""
    ended: int | None
    """The id with which the policy ended its turn; None: something else ended it."""
    stop: str | None
    """The stop string that ended it."""
    thinks: bool
    """Its ids hold thinking, of this reply or of earlier ones."""
    calls_tools: bool

    def ids(self) -> tuple[TokenIds, TokenIds]:
        """Prompt and reply."""
        whole = self.captured.sequence()
        prompt: TokenIds = whole.slice(0, self.prompt_length)
        return prompt, whole.slice(self.prompt_length, len(whole)) if self.reply is None else self.reply

    @property
    def size(self) -> int:
        return TURN_BYTES + (0 if self.reply is None else len(self.reply.data))


@dataclass(frozen=True, slots=True)
class Found:
    """The longest earlier call whose messages and reply a request begins with."""

    turn: Turn
    messages: int
    """Of the request, that call's reply included."""
    thinking: bool
    """Their thinking is as it was, too; False: the harness left some out."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What of a call is remembered beside its record."""

    conversation: Conversation
    tools: Digest
    setting: Digest
    canonical: Canonical | None = None
    thinks: bool = False
    """Its prompt holds sampled thinking."""


@dataclass(slots=True)
class Turns:
    """Of one attempt."""

    strict: dict[Digest, Turn] = field(default_factory=dict)
    loose: dict[Digest, Turn] = field(default_factory=dict)
    openings: set[Digest] = field(default_factory=set)
    asked: set[Digest] = field(default_factory=set)
    """Whole prompts."""

    def find(self, conversation: Conversation) -> Found | None:
        """What `conversation` goes on with; of equal replies the last one captured."""
        messages = conversation.messages
        for count in range(len(messages), 1, -1):
            if messages[count - 1].get("role") != "assistant":
                continue
            for known, key, same in (
                (self.strict, conversation.strict[count], True),
                (self.loose, conversation.loose[count], False),
            ):
                turn = known.get(key)
                if turn is not None:
                    return Found(turn, count, same)
        return None

    def kind(self, conversation: Conversation, found: Found | None) -> Kind | None:
        """See `CompletionCaptured.context_kind`."""
        if found is not None:
            as_said = found.thinking and not conversation.replies(found.messages)
            return "append" if as_said else "rewrite"
        if conversation.opening in self.openings and conversation.whole not in self.asked:
            return "rewrite"
        return None if conversation.replies() and conversation.whole not in self.asked else "fresh"

    def add(self, marks: Marks, captured: Captured, record: CompletionCaptured, prompt_length: int) -> int:
        """Remember the replies of `record`; returns the bytes that takes, about."""
        conversation = marks.conversation
        first = first_choice(record.choices)
        size = 0
        for choice in record.choices:
            turn = Turn(
                captured=captured,
                prompt_length=prompt_length,
                reply=None if choice is first else choice.ids,
                tools=marks.tools,
                setting=marks.setting,
                canonical=marks.canonical,
                ended=ended_by(choice),
                stop=choice.stop if isinstance(choice.stop, str) else None,
                thinks=marks.thinks or bool(thinking(choice.message)),
                calls_tools=bool(choice.message.get("tool_calls")),
            )
            strict, loose = conversation.reply(choice.message)
            self.strict[strict] = turn
            self.loose[loose] = turn
            size += turn.size
        self.asked.add(conversation.whole)
        if conversation.opening is not None:
            self.openings.add(conversation.opening)
        return size


def ended_by(choice: Choice) -> int | None:
    """The id with which the policy ended its turn itself."""
    if choice.finish is None or choice.finish in CUT or isinstance(choice.stop, str) or not len(choice.ids):
        return None
    return int(choice.ids.array[-1])
