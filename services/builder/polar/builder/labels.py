"""Which calls are the agent's own conversation and which are made beside it: main, sub-agent, compaction, side.

A harness's marks decide where it gives any (`ClientHints`). Most give none, so what is left is judged by structure:

- Calls whose messages go on from each other, or that begin with the same words, are one conversation; so are the calls
  of a thread that the harness names. The first with tools is the main one (the one of most calls where none has tools).
- `summary`: a conversation starts (again) from the reply of an earlier call that had a history to sum up, or a system
  prompt of its own: that call is a compaction, and the conversation is what was compacted.
- `tool_argument`: a conversation with tools begins with what an earlier tool call was given: a sub-agent.
- `pending_call`: a conversation with another system prompt and tools begins while a tool call is not answered yet: a
  sub-agent.
- `after_the_turn`: it begins after a final answer, with some of the main tools and another system prompt: side.
- `no_tools`: a conversation without tools and with another system prompt beside a main one with tools, or a call on top
  of a conversation that has tools, without them, from which nothing goes on: side.
- `probe`: one call that asked for a few tokens only, beside a main conversation that does not; `grammar`: calls held to
  a grammar beside one that is not: side.
- What nothing speaks against is the agent's own: `main`.

Pure, and a function of the whole session: a compaction shows only in what comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from polar.schemas import ClientHints, Label

from .messages import text_of
from .samples import Material, Sample

PROBE_TOKENS: Final = 64
"""Most that a title, a topic or a quota probe asks for."""
TELLING: Final = 12
"""Characters that a text has at least if finding it elsewhere is to show anything."""
LOOK_BACK: Final = 16
"""Calls before a new start in which its summary is looked for."""

_KINDS: Final = {
    "compaction": Label.COMPACTION,
    "compact": Label.COMPACTION,
    "summarize": Label.COMPACTION,
    "side": Label.SIDE,
    "title": Label.SIDE,
    "probe": Label.SIDE,
    "classifier": Label.SIDE,
    "quota": Label.SIDE,
}
_OWN: Final = frozenset({"turn", "main"})
"""Words for a call of the conversation itself."""


class Labelled(NamedTuple):
    label: Label
    by: str
    """What showed it."""


def marked(hints: ClientHints) -> Labelled | None:
    """What the harness itself says of a call, if it does."""
    word = (hints.request_kind or "").lower()
    kind = _KINDS.get(word)
    if kind is not None:
        return Labelled(kind, "mark:request_kind")
    if hints.subagent is not None:
        return Labelled(Label.SUBAGENT, "mark:subagent")
    if hints.parent is not None:
        return Labelled(Label.SUBAGENT, "mark:parent")
    return Labelled(Label.MAIN, "mark:request_kind") if word in _OWN else None


def labels(material: Material, *, structure: bool = True) -> list[Labelled]:
    """A label for each of the material's samples; `structure` False: by marks alone."""
    told = [marked(one.completion.hints) for one in material.samples]
    if not structure:
        return [one or Labelled(Label.MAIN, "") for one in told]
    return _Session(material, told).labels()


@dataclass(slots=True)
class _Conversation:
    number: int
    thread: str | None
    calls: list[Sample] = field(default_factory=list)
    label: Labelled | None = None

    @property
    def first(self) -> Sample:
        return self.calls[0]

    @property
    def tools(self) -> bool:
        return any(one.tools is not None for one in self.calls)


class _Session:
    def __init__(self, material: Material, told: list[Labelled | None]) -> None:
        self._material = material
        self._samples = material.samples
        self._told = told
        self._conversations: list[_Conversation] = []
        self._of: list[_Conversation] = []
        """Of each sample."""
        self._starts: list[Sample] = []
        """Samples whose prompt holds no earlier reply and is none of before."""
        self._went_on = np.zeros(material.messages.path_count, np.bool_)
        """Of each conversation with a reply (`Sample.said`): whether a later prompt begins with it."""
        self._goes_on: set[int] = set()
        """Samples whose prompt holds an earlier reply."""
        self._compactions: set[int] = set()
        """Samples."""
        self._goes_on_with: dict[int, _Conversation] = {}
        """By number of a conversation: the one whose summary it starts from."""
        self._said: dict[int, str] = {}
        self._asked: dict[int, list[str]] = {}
        self._group()

    def labels(self) -> list[Labelled]:
        self._by_marks()
        self._find_compactions()
        main = self._main()
        for one in self._conversations:
            was = self._goes_on_with.get(one.number)
            if one.label is None and was is not None and was.label is not None:
                one.label = Labelled(was.label.label, "summary")
            elif one.label is None:
                one.label = Labelled(Label.MAIN, "") if one is main else self._judged(one, main)
        return [self._labelled(one) for one in self._samples]

    def _labelled(self, sample: Sample) -> Labelled:
        own, conversation = self._told[sample.index], self._of[sample.index]
        if own is not None:
            return own
        if sample.index in self._compactions:
            return Labelled(Label.COMPACTION, "summary")
        assert conversation.label is not None
        if conversation.label.label in (Label.MAIN, Label.SUBAGENT) and self._aside(sample, conversation):
            return Labelled(Label.SIDE, "no_tools")
        return conversation.label

    def _aside(self, sample: Sample, conversation: _Conversation) -> bool:
        """Whether a call only asks something on top of its conversation, which then goes on without it."""
        if sample.tools is not None or self._went_on[sample.said]:
            return False
        with_tools = [one.index for one in conversation.calls if one.tools is not None]
        return bool(with_tools) and with_tools[0] < sample.index < with_tools[-1]

    # conversations

    def _group(self) -> None:
        by_path: dict[int, _Conversation] = {}
        is_reply = np.zeros(self._material.messages.path_count, np.bool_)
        by_opening: dict[tuple[str | None, Any], _Conversation] = {}
        for sample in self._samples:
            thread = sample.completion.hints.thread
            # newest first; most prompts go on from the call before them
            known = next((path for path in sample.conversations() if path in by_path), None)
            found = by_path[known] if known is not None else self._by_ids(sample)
            if found is not None and found.thread != thread:
                found, known = None, None
            key = (thread, self._opening(sample))
            found = found or by_opening.get(key)
            if found is None:
                found = _Conversation(len(self._conversations), thread)
                self._conversations.append(found)
            by_opening.setdefault(key, found)
            replies = sample.paths[is_reply[sample.paths]]
            self._went_on[replies] = True
            if len(replies):
                self._goes_on.add(sample.index)
            elif sample.path not in by_path:
                self._starts.append(sample)
            found.calls.append(sample)
            self._of.append(found)
            if sample.path >= 0:
                by_path[sample.path] = found
            is_reply[sample.said] = True

    def _by_ids(self, sample: Sample) -> _Conversation | None:
        """Where there are no messages, as in some token-in sessions."""
        if len(sample.paths):
            return None
        before = next(iter((*sample.extends, *sample.starts_like)), None)
        return None if before is None else self._of[before]

    def _opening(self, sample: Sample) -> Any:
        """Its system messages and the first that is none; equal in prompts of one conversation, rewritten or not."""
        messages = self._material.messages.messages
        for at in range(len(sample.messages)):
            if messages[sample.messages[at]].get("role") not in ("system", "developer"):
                return int(sample.paths[at])
        return -1 - sample.index

    def _main(self) -> _Conversation | None:
        open_ = [one for one in self._conversations if one.label is None or one.label.label is Label.MAIN]
        with_tools = [one for one in open_ if one.tools]
        if with_tools:
            return with_tools[0]
        return max(open_, key=lambda one: (len(one.calls), -one.number), default=None)

    def _by_marks(self) -> None:
        for one in self._conversations:
            told = [found for call in one.calls if (found := self._told[call.index]) is not None]
            for label in (Label.SUBAGENT, Label.MAIN):
                one.label = one.label or next((found for found in told if found.label is label), None)
            if one.label is None and len(told) == len(one.calls) and {found.label for found in told} == {Label.SIDE}:
                one.label = told[0]

    # compactions

    def _find_compactions(self) -> None:
        for start in self._starts[1:]:
            summary = self._summary_of(start)
            if summary is None:
                continue
            # asked again where the first answer was a tool call
            twins = self._samples[max(0, summary.index - LOOK_BACK) : summary.index]
            self._compactions.update(one.index for one in twins if len(one.paths) and one.path == summary.path)
            self._compactions.add(summary.index)
            was, now = self._of[summary.index], self._of[start.index]
            if all(one.index in self._compactions for one in was.calls):
                # asked in a conversation of its own: what it sums up is what was said just before
                was.label = was.label or Labelled(Label.COMPACTION, "summary")
                was = next((one for one in reversed(self._of[: summary.index]) if one is not was), was)
            if now is not was:
                self._goes_on_with[now.number] = was

    def _summary_of(self, start: Sample) -> Sample | None:
        """The earlier call whose reply a prompt starts from."""
        for at in range(start.index - 1, max(-1, start.index - 1 - LOOK_BACK), -1):
            one = self._samples[at]
            if one.choice.message.get("tool_calls") or self._went_on[one.said]:
                continue
            if one.completion.hints.thread != start.completion.hints.thread:
                continue
            if one.index not in self._goes_on and self._system(one) == self._system(start):
                continue  # there was nothing to sum up: a reply that the next prompt quotes
            lines = _telling_lines(text_of(one.choice.message))
            if not lines:
                continue
            given = self._given(start)
            quoted = sum(len(line) for line in lines if line in given)
            if 2 * quoted >= sum(map(len, lines)):
                return one
        return None

    def _given(self, sample: Sample) -> str:
        """What a prompt says, but for replies and results."""
        known = self._said.get(sample.index)
        if known is None:
            messages = (self._material.messages.messages[one] for one in sample.messages.tolist())
            known = "\n".join(text_of(one) for one in messages if one.get("role") not in ("assistant", "tool"))
            self._said[sample.index] = known
        return known

    def _arguments(self, sample: Sample) -> list[str]:
        """What its reply's tool calls are given, as far as it tells something."""
        known = self._asked.get(sample.index)
        if known is None:
            calls = sample.choice.message.get("tool_calls")
            known = self._asked[sample.index] = [one for one in _texts(calls) if len(one) >= TELLING]
        return known

    # judging

    def _judged(self, one: _Conversation, main: _Conversation | None) -> Labelled:
        if main is None:
            return Labelled(Label.MAIN, "")
        other = self._system(one.first) != self._system(main.first)
        if not one.tools and main.tools:
            return Labelled(Label.SIDE, "no_tools") if other else Labelled(Label.MAIN, "")
        if not one.tools:
            return self._judged_bare(one, main)
        if self._argument(one):
            return Labelled(Label.SUBAGENT, "tool_argument")
        if not other:
            return Labelled(Label.MAIN, "")
        before = self._main_call_before(one.first)
        if before is not None and before.choice.message.get("tool_calls"):
            return Labelled(Label.SUBAGENT, "pending_call")
        if before is not None and self._tool_names(one.first) < self._tool_names(before):
            return Labelled(Label.SIDE, "after_the_turn")
        return Labelled(Label.MAIN, "")

    def _main_call_before(self, sample: Sample) -> Sample | None:
        for before in reversed(self._samples[: sample.index]):
            told = self._of[before.index].label
            if told is not None and told.label is Label.MAIN and before.index not in self._compactions:
                return before
        return None

    def _judged_bare(self, one: _Conversation, main: _Conversation) -> Labelled:
        """Neither it nor the main conversation has tools."""
        if all("grammar" in call.completion.constraints for call in one.calls) and not any(
            "grammar" in call.completion.constraints for call in main.calls
        ):
            return Labelled(Label.SIDE, "grammar")
        asked = [call.completion.sampling_asked.max_tokens for call in one.calls]
        usual = main.first.completion.sampling_asked.max_tokens
        small = len(asked) == 1 and asked[0] is not None and asked[0] <= PROBE_TOKENS
        if small and (usual is None or usual > PROBE_TOKENS):
            return Labelled(Label.SIDE, "probe")
        return Labelled(Label.MAIN, "")

    def _argument(self, one: _Conversation) -> bool:
        """Whether it begins with what a tool call of another conversation was given."""
        given = self._given(one.first)
        for call in reversed(self._samples[: one.first.index]):
            if self._of[call.index] is one:
                continue
            known = self._given(self._of[call.index].first)
            if any(text in given and text not in known for text in self._arguments(call)):
                return True
        return False

    def _system(self, sample: Sample) -> tuple[int, ...]:
        messages = self._material.messages.messages
        return tuple(
            form
            for number, form in zip(sample.messages.tolist(), sample.normals.tolist(), strict=True)
            if messages[number].get("role") in ("system", "developer")
        )

    def _tool_names(self, sample: Sample) -> frozenset[str]:
        tools = [] if sample.tools is None else self._material.messages.tools[sample.tools]
        functions = (one.get("function") for one in tools if isinstance(one, dict))
        return frozenset(str(one.get("name")) for one in functions if isinstance(one, dict))


def _telling_lines(text: str) -> list[str]:
    return [line for part in re.split(r"[\r\n]+|</?\w+>", text) if len(line := part.strip()) >= TELLING]


def _texts(calls: Any) -> Iterator[str]:
    """Every text in the arguments of tool calls."""
    left: list[Any] = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        left.append(function.get("arguments") if isinstance(function, dict) else None)
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str):
            try:
                value = msgspec.json.decode(one)
            except (msgspec.DecodeError, RecursionError):
                value = one
            if isinstance(value, dict | list):
                left.append(value)
            else:
                yield one.strip()
