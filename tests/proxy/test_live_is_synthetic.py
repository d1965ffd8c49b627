"""Live tells and records what synthetic does on the same tokens, in every dialect, and so does who comes late.

Whatever an engine's chunks are: the reply that a client puts together of a live stream is the one it gets of a reply
that was told at once, and the record is the same, byte for byte. Pure: chunks in, events out; the calls of each dialect
through its official client are in `test_*_calls.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.proxy.answer import Answer
from polar.proxy.calls import Call, Delta, Reply
from polar.proxy.dialects import AnthropicMessages, Dialect, GoogleGenerate, Limits, OpenAIChat, StreamEncoder, Told
from polar.proxy.gate import Gate
from polar.proxy.record import Facts, captured
from polar.proxy.transcript import Transcript
from polar.schemas import CallStarted, ClientHints, Engine, LogprobsMode, Sampling
from polar.schemas.wire import encode
from polar.service.tokens import SessionToken
from tests.proxy import anthropic_harness, google_harness, responses_harness
from tests.proxy.test_calls import TOOLS, USER
from tests.proxy.wire_harness import CLOSES, gathered_chat, gathered_messages, sse

Json = dict[str, Any]
PROMPT = [7, 8, 9]
TOLD = Told("0191-c1", 1, "m")
LIMITS = Limits(max_choices=4)
NAMES = ("get_weather", "note", "unheard_of")
STOP = "END"


class Made(NamedTuple):
    """What a model wrote in one choice, in pieces: reasoning, text, calls `(name, pieces of arguments)`, more text."""

    reasoning: list[str]
    text: list[str]
    calls: list[tuple[str, list[str]]]
    after: list[str]
    finish: str
    stop: str | None

    def message(self) -> Json:
        """As an engine tells it whole."""
        text = "".join([*self.text, *self.after])
        found: Json = {"role": "assistant", "content": text}
        if reasoning := "".join(self.reasoning):
            found["reasoning"] = reasoning
        if self.calls:
            found["content"] = text if text.strip() else None
            found["tool_calls"] = [
                {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for i, (name, pieces) in enumerate(self.calls)
            ]
        return found

    def deltas(self) -> list[Json]:
        """As it tells it in a stream, a token each."""
        found: list[Json] = [{"reasoning": piece} for piece in self.reasoning]
        found += [{"content": piece} for piece in self.text]
        for i, (name, (first, *pieces)) in enumerate(self.calls):
            head = {"index": i, "id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": first}}
            found.append({"tool_calls": [head]})
            found += [{"tool_calls": [{"index": i, "function": {"arguments": piece}}]} for piece in pieces]
        found += [{"content": piece} for piece in self.after]
        return [*found, {}]  # the token that ends the turn says nothing


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    marks = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(marks)] or [""]


words = st.text(alphabet='a \n{}"\\é☀️👩‍🚀\u2028', max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
well_formed = st.builds(
    json.dumps,
    st.dictionaries(st.sampled_from(("city", "input", "ä")), json_values, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from((None, 1)),
)
flags = st.booleans()
arguments = st.one_of(well_formed, well_formed.map(lambda text: text[:-1]), words, st.just(""), st.just("[1]"))


@st.composite
def made(draw: st.DrawFn) -> Made:
    cuts = st.lists(st.integers(0, 60), max_size=5)

    def cut(text: str) -> list[str]:
        return [piece for piece in pieces(text, draw(cuts)) if piece]

    calls = draw(st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3))
    finish = draw(st.sampled_from(("stop", "length")))
    stop = STOP if not calls and finish == "stop" and draw(flags) else None
    after = draw(words) if calls and draw(flags) else ""
    return Made(
        reasoning=cut(draw(st.just("") | words)),
        text=cut(draw(words)),
        calls=[(name, pieces(text, draw(cuts))) for name, text in calls],
        after=cut(after),
        finish="tool_calls" if calls and finish == "stop" else finish,
        stop=stop,
    )


def entry(index: int, at: int) -> Json:
    return {"token": f"t{at}", "logprob": -0.5 * at - index, "bytes": [97], "top_logprobs": []}


def whole_body(choices: Sequence[Made]) -> bytes:
    told = []
    for index, choice in enumerate(choices):
        count = len(choice.deltas())
        told.append(
            {
                "index": index,
                "message": choice.message(),
                "token_ids": list(range(count)),
                "logprobs": {"content": [entry(index, at) for at in range(count)]},
                "finish_reason": choice.finish,
                "stop_reason": choice.stop,
            }
        )
    sampled = sum(len(choice.deltas()) for choice in choices)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": sampled, "total_tokens": len(PROMPT) + sampled}
    return json.dumps({"choices": told, "prompt_token_ids": PROMPT, "usage": usage}).encode()


def chunks(choices: Sequence[Made], grouping: Sequence[int]) -> list[bytes]:
    """The same as a stream: a chunk of as many tokens as the grouping says in turn, choices in turn."""
    found = [json.dumps({"choices": [], "prompt_token_ids": PROMPT}).encode()]
    waiting = [(index, list(enumerate(choice.deltas()))) for index, choice in enumerate(choices)]
    sizes = itertools.cycle(grouping)
    while waiting:
        for index, deltas in list(waiting):
            some = [deltas.pop(0)]
            size = next(sizes)
            # one delta tells one kind of thing, so only what says nothing goes with what stands before it
            while deltas and len(some) < size and not deltas[0][1]:
                some.append(deltas.pop(0))
            choice: Json = {
                "index": index,
                "delta": some[0][1],
                "token_ids": [at for at, _ in some],
                "logprobs": {"content": [entry(index, at) for at, _ in some]},
            }
            if not deltas:
                choice |= {"finish_reason": choices[index].finish, "stop_reason": choices[index].stop}
                waiting.remove((index, deltas))
            found.append(json.dumps({"choices": [choice]}).encode())
    sampled = sum(len(choice.deltas()) for choice in choices)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": sampled, "total_tokens": len(PROMPT) + sampled}
    return [*found, json.dumps({"choices": [], "usage": usage}).encode()]


class Stream(NamedTuple):
    """One request for a stream in one dialect."""

    dialect: Dialect
    call: Call
    gathered: Callable[[bytes], Any]
    closes: Callable[[bytes], bool]


def array(data: bytes) -> Any:
    return google_harness.gathered(json.loads(data))


@cache
def streams(logprobs: bool, hide: bool) -> list[Stream]:
    """All of one choice, and two of several."""
    chat: Json = {"model": "m", "messages": USER, "tools": TOOLS, "stream": True, "stop": [STOP], "n": 1}
    chat |= {"stream_options": {"include_usage": True}, "logprobs": logprobs}
    thinking = {"type": "adaptive", "display": "omitted" if hide else "summarized"}
    messages = anthropic_harness.fields(
        tools=anthropic_harness.TOOLS, stream=True, thinking=thinking, stop_sequences=[STOP]
    )
    sealed: Json = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]} if hide else {}
    offered = [responses_harness.FUNCTION, responses_harness.CUSTOM]
    respond = responses_harness.fields(tools=offered, stream=True, **sealed)
    generate: Json = google_harness.fields(tools=google_harness.TOOLS)
    generate["generationConfig"] = {"thinkingConfig": {"includeThoughts": not hide}, "stopSequences": [STOP]}
    asked: list[tuple[Dialect, Json, Callable[[bytes], Any]]] = [
        (OpenAIChat(), chat, lambda data: gathered_chat(sse(data))),
        (OpenAIChat(), chat | {"n": 3}, lambda data: gathered_chat(sse(data))),
        (AnthropicMessages(), messages, lambda data: gathered_messages(sse(data))),
        (responses_harness.dialect(), respond, lambda data: responses_harness.gathered(sse(data))),
        (GoogleGenerate("m", stream=True, sse=True), generate, lambda data: google_harness.gathered(sse(data))),
        (GoogleGenerate("m", stream=True, sse=False), generate, array),
    ]
    found = []
    for dialect, body, gathered in asked:
        call = dialect.parse(json.dumps(body).encode(), LIMITS)
        closes = (lambda data: b"finishReason" in data) if gathered is array else CLOSES[dialect.name]
        found.append(Stream(dialect, call, gathered, closes))
    return found


def record(call: Call, reply: Reply) -> bytes:
    """What goes on the log, but for times."""
    token = SessionToken(session_id="s", attempt=1, task_id="t", group_id="g", sample=0, model="m", not_after_ms=1)
    facts = Facts(
        token=token,
        started=CallStarted(completion_id="c", session_id="s", attempt=1, call=0, dialect=call.dialect, at_ms=1),
        call=call,
        sampling=Sampling(temperature=1.0),
        engine=Engine(model="m", endpoint="e", logprobs_mode=LogprobsMode.PROCESSED),
        request_sha256="0" * 64,
        hints=ClientHints(),
    )
    return encode(captured(facts, reply, before=None, after=None, first_token_ms=None, ended_ms=2))


def ended(stream: Stream, encoder: StreamEncoder, told: bytes, rest: Sequence[Delta], reply: Reply) -> Any:
    """The reply that a client has in the end; until then nothing was closed."""
    assert not stream.closes(told)
    return stream.gathered(told + encoder.deltas(rest) + encoder.finish(reply))


def synthetic(stream: Stream, choices: Sequence[Made]) -> tuple[Any, bytes]:
    answer = Answer(len(choices), keep_entries=stream.call.logprobs)
    answer.feed(whole_body(choices))
    reply = answer.reply()
    encoder = stream.dialect.stream(stream.call, TOLD)
    return ended(stream, encoder, b"", reply.deltas(), reply), record(stream.call, reply)


def live(
    stream: Stream, choices: Sequence[Made], grouping: Sequence[int], comes: Sequence[int]
) -> tuple[Any, bytes, Any]:
    """What the first client has, the record, and what a client has that reads now and then only."""
    answer = Answer(len(choices), keep_entries=stream.call.logprobs)
    gate, transcript = Gate(len(choices)), Transcript(len(choices))
    first, late = stream.dialect.stream(stream.call, TOLD), stream.dialect.stream(stream.call, TOLD)
    reader = transcript.reader()
    told, told_late = b"", b""
    for at, chunk in enumerate(chunks(choices, grouping)):
        passed = [one for delta in answer.feed(chunk) if (one := gate.admit(delta)) is not None]
        first.prompt(len(PROMPT))
        told += first.deltas(passed)
        transcript.add(passed)
        if at in comes:
            told_late += late.deltas(reader.read())
    reply, rest = answer.reply(), gate.rest()
    told_late += late.deltas(reader.read())
    return (
        ended(stream, first, told, rest, reply),
        record(stream.call, reply),
        ended(stream, late, told_late, rest, reply),
    )


def unordered(reply: Json) -> Json:
    """A reply whose blocks or items have no order."""
    return {
        name: sorted(value, key=json.dumps) if name in ("content", "output") else value for name, value in reply.items()
    }


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=st.tuples(made(), made(), made()),
    grouping=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    comes=st.lists(st.integers(0, 30), max_size=3),
    logprobs=st.booleans(),
    hide=st.booleans(),
)
def test_live_and_late_are_synthetic(
    choices: tuple[Made, Made, Made], grouping: list[int], comes: list[int], logprobs: bool, hide: bool
) -> None:
    for stream in streams(logprobs, hide):
        some = choices[: stream.call.n]
        expected, recorded = synthetic(stream, some)
        told, on_log, told_late = live(stream, some, grouping, comes)
        assert on_log == recorded
        if some[0].after and not "".join(some[0].text).strip():
            # a message does not say that its text came after its calls; who was told a call first has it first
            told, told_late, expected = (unordered(one) for one in (told, told_late, expected))
        assert told == expected
        assert told_late == expected


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made(), st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_a_reader_gets_everything_once_in_as_few_pieces_as_there_are_parts(
    one: Made, comes: list[int], logprobs: bool
) -> None:
    answer, transcript = Answer(1, keep_entries=logprobs), Transcript(1)
    whole, slow = transcript.reader(), transcript.reader()
    deltas: list[Delta] = []
    read: list[Delta] = []
    for at, chunk in enumerate(chunks([one], [1])):
        added = answer.feed(chunk)
        deltas += added
        transcript.add(added)
        if at in comes:
            read += slow.read()
    read += slow.read()
    assert plain(read) == plain(deltas)
    once = whole.read()
    assert plain(once) == plain(deltas)
    assert len(once) <= 4 + len(one.calls)
    assert whole.read() == slow.read() == []


def plain(deltas: Sequence[Delta]) -> Any:
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        for tool in delta.tools:
            if tool.name is not None:
                calls[tool.index] = [tool.id, tool.name, ""]
            calls[tool.index][2] += tool.arguments
    text, reasoning = "".join(one.content for one in deltas), "".join(one.reasoning for one in deltas)
    return text, reasoning, calls, [entry.logprob for delta in deltas for entry in delta.entries]
