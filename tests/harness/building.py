"""What a builder has to make of a session that a real CLI just had: asserted right after each run."""

from __future__ import annotations

import os
from typing import NamedTuple

from tokenizers import Tokenizer

from polar.builder import Entry, rebuild
from polar.devmodel import ChatTokenizer
from polar.devmodel.chat import BUNDLED_TEMPLATE, BUNDLED_TOKENIZER, bundled
from polar.schemas import BuilderSpec, CompletionCaptured, RecordRef, Trajectory
from tests.harness.adapters import Adapter
from tests.harness.place import Place, framed_session

_SAYS = "message.role) ~ '\\n' ~ text -}}"
_THINKS = """message.role) ~ '\\n' -}}
    {%- if message.reasoning -%}{{- '<think>\\n' ~ message.reasoning.strip('\\n') ~ '\\n</think>\\n\\n' -}}{%- endif -%}
    {%- set text = text.lstrip('\\n') if message.reasoning else text -%}
    {{- text -}}"""
OTHER_TEMPLATE = "POLAR_TEST_CHAT_TEMPLATE" in os.environ
"""Then these expectations are of no template that runs."""


def keeps_thinking() -> ChatTokenizer:
    """The bundled tokenizer under a template that shows thinking as Qwen3's does; the bundled one leaves it out."""
    template = bundled(BUNDLED_TEMPLATE)
    assert _SAYS in template
    return ChatTokenizer(Tokenizer.from_str(bundled(BUNDLED_TOKENIZER)), template.replace(_SAYS, _THINKS))


class Told(NamedTuple):
    """A trace, as far as these tests look at it."""

    label: str
    calls: int
    ends: str | None = None
    """`reason` or `reason (detail)`."""


async def built(place: Place, strategy: str = "prefix_merging") -> Trajectory:
    """The session as a builder makes it, every call accounted for and none set aside."""
    records = await place.records()
    events = framed_session(place.session, records)
    entries = [Entry(RecordRef(topic="completions", partition=0, offset=at), one) for at, one in enumerate(events)]
    trajectory = rebuild(entries, BuilderSpec(strategy=strategy))
    assert trajectory.error is None, trajectory.error
    assert trajectory.set_aside == []
    captured = {one.completion_id for one in records if isinstance(one, CompletionCaptured)}
    assert {turn.completion_id for trace in trajectory.traces for turn in trace.turns} == captured
    return trajectory


def traces(trajectory: Trajectory) -> list[Told]:
    """In the order of `expected`: which call of several at one time comes first is the harness's affair."""
    found = []
    for trace in trajectory.traces:
        detail = f" ({trace.break_detail})" if trace.break_detail else ""
        ends = None if trace.break_reason is None else trace.break_reason + detail
        found.append(Told(str(trace.label), len({turn.completion_id for turn in trace.turns}), ends))
    return sorted(found, key=str)


def expected(cli: Adapter, *own: Told) -> list[Told]:
    """These traces, and of what this CLI asks beside every session."""
    title = [Told("side", 1)] if cli.name == "opencode" else []
    return sorted([*title, *own], key=str)


DROPPED = Told("main", 1, "history_changed (template)")
"""A reply with a thought that the template leaves out: nothing can go on from it."""
