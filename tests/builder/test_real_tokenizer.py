"""Merging with a real tokenizer and a real chat template, where text and back gives other ids."""

from __future__ import annotations

import random
from typing import Any

import pytest

from polar.builder import rebuild
from polar.schemas import Context
from tests.builder.toy import Message, Reply, Session, system, tool, user

chat = pytest.importorskip("polar.devmodel.chat", reason="polar.devmodel brings the tokenizer")

WORDS = ("the quick brown fox", "running", "internationalization", "a\nb", "12345", "naïve", "🙂", "def f():", "x  y")


class Model:
    """Samples replies as ids that spell the text in an odd way, as a hot policy does."""

    def __init__(self, seed: int) -> None:
        self.tokens: Any = chat.ChatTokenizer.small()
        self.chance = random.Random(seed)

    def prompt(self, messages: list[Message]) -> list[int]:
        return list(self.tokens.render(messages))

    def say(self, odd: bool, before: str = "") -> Reply:
        text = before + " ".join(self.chance.choice(WORDS) for _ in range(self.chance.randint(1, 6)))
        ids = self.tokens.encode(text)
        if odd:
            cut = self.chance.randint(1, max(1, len(text) - 1))
            ids = [*self.tokens.encode(text[:cut]), *self.tokens.encode(text[cut:])]
        assert self.tokens.decode(ids) == text
        return Reply([*ids, self.tokens.eos_id], {"role": "assistant", "content": text})


@pytest.mark.parametrize("seed", range(5))
def test_a_session_of_odd_spellings_is_one_trace_of_the_same_text(seed: int) -> None:
    model = Model(seed)
    session = Session(seed=seed)
    messages = [system("You help."), user("Say something.")]
    odd = 0
    for turn in range(8):
        reply = model.say(odd=turn % 2 == 1)
        odd += model.tokens.encode(reply.message["content"]) != reply.ids[:-1]
        session.call(messages, reply, prompt=model.prompt(messages))
        messages = [*messages, reply.message, tool("done") if turn % 3 else user("Go on.")]
    session.close()
    trajectory = rebuild(session.records)
    (trace,) = trajectory.traces
    view = trajectory.view(trace)
    last = session.truth[-1]
    shown = model.tokens.decode([*view.prompt_ids.tolist(), *view.response_ids.tolist()])
    assert shown == model.tokens.decode([*last.prompt, *last.ids])
    for turn, true in zip(trace.turns, session.truth, strict=True):
        start = turn.start - trace.prompt_length
        assert view.response_ids[start : start + len(true.ids)].tolist() == true.ids
        before = [*view.prompt_ids.tolist(), *view.response_ids[:start].tolist()]
        assert (before == true.prompt) == (turn.context is Context.EXACT)
    assert odd >= len(trace.drift) >= odd - 1  # the last reply is not rendered again


def test_a_reply_whose_beginning_melts_into_the_prompt_merges_as_retokenized() -> None:
    model = Model(1)
    session = Session()
    messages = [system("You help."), user("Say something.")]
    for before in ("", "", "   ", ""):
        reply = model.say(odd=False, before=before)
        session.call(messages, reply, prompt=model.prompt(messages))
        messages = [*messages, reply.message, user("Go on.")]
    session.close()
    trajectory = rebuild(session.records)
    (trace,) = trajectory.traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT] * 3 + [Context.RETOKENIZED]
    (drift,) = trace.drift
    assert (drift.turn, drift.position) == (2, -1)  # the newline of the generation prompt
    view = trajectory.view(trace)
    last = session.truth[-1]
    shown = model.tokens.decode([*view.prompt_ids.tolist(), *view.response_ids.tolist()])
    assert shown == model.tokens.decode([*last.prompt, *last.ids])
