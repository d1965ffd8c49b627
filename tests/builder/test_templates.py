"""Merging under chat templates that do not show what was sampled as it was sampled, with a real tokenizer.

The templates here have the habits of well-known ones: an empty thought in the generation prompt, thinking that older
turns lose, texts that are trimmed.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from polar.builder import rebuild
from polar.builder.texts import Tokenizers, respaced
from polar.schemas import BuilderSpec, Context, TraceView, Trajectory
from tests.builder.toy import Message, Reply, Session, tool, user

chat = pytest.importorskip("polar.devmodel.chat", reason="polar.devmodel brings the tokenizer")

TURN = """\
{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
SAID<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
OPENS{% endif -%}"""
CALLS = (
    "{% for call in message.tool_calls or [] %}<call>{{ {'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson }}</call>{% endfor %}"
)
THOUGHT = "{% if message.reasoning %}<think>\n{{ message.reasoning }}\n</think>\n\n{% endif %}"
PLAIN = "{{ message.content or '' }}" + CALLS
TEMPLATES = {
    "plain": (PLAIN, ""),
    "thinking kept": (THOUGHT + PLAIN, ""),
    "thinking trimmed and kept": (THOUGHT.replace("reasoning }}", "reasoning | trim }}") + PLAIN, ""),
    "thinking as it came": (THOUGHT.replace("\n{{", "{{").replace("}}\n", "}}") + PLAIN, ""),
    "thinking dropped": (PLAIN, ""),
    "a line before calls": ("{{ message.content or '' }}{{ '\n' if message.tool_calls }}" + CALLS, ""),
    "thinking opened and kept": (THOUGHT + PLAIN, "<think>\n"),
    "thinking opened and dropped": (PLAIN, "<think>\n"),
    "no thinking": (PLAIN, "<think>\n\n</think>\n\n"),
    "trimmed": ("{{ (message.content or '') | trim }}" + CALLS, ""),
    "calls dropped": ("{{ message.content or '' }}", ""),
}


@pytest.fixture(scope="session")
def tokenizer_file() -> Path:
    with resources.as_file(resources.files("polar.devmodel").joinpath("data", "tokenizer.json")) as path:
        return path


class Model:
    def __init__(self, template: str, file: Path) -> None:
        said, opens = TEMPLATES[template]
        text = TURN.replace("SAID", said).replace("OPENS", opens)
        self.tokens: Any = chat.ChatTokenizer(Tokenizer.from_file(str(file)), text)
        self.opens = opens

    def prompt(self, messages: list[Message]) -> list[int]:
        return list(self.tokens.render(messages))

    def reply(self, text: str, message: Message | None = None) -> Reply:
        """A reply that samples `text`, cut into ids at each `·` besides."""
        ids = [one for part in text.split("·") for one in self.tokens.encode(part)]
        whole = text.replace("·", "")
        return Reply([*ids, self.tokens.eos_id], message or {"role": "assistant", "content": whole})


def built(
    template: str, file: Path, replies: list[tuple[str, Message | None]], *, decode: bool, echo: Any = None
) -> tuple[Model, Session, Trajectory]:
    model = Model(template, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    session = Session(builder=BuilderSpec(config={"tokenizer": digest} if decode else {}))
    messages = [user("Say something.")]
    for text, message in replies:
        reply = model.reply(text, message)
        session.call(messages, reply, prompt=model.prompt(messages))
        shown = echo(reply.message) if echo else reply.message
        messages = [*messages, shown, tool("done") if message and message.get("tool_calls") else user("Go on.")]
    session.close()
    trajectory = rebuild(session.records, tokenizers=Tokenizers([file]))
    assert trajectory.error is None, trajectory.error
    return model, session, trajectory


def found(trajectory: Trajectory) -> list[tuple[str | None, str | None, int]]:
    return [(one.break_reason, one.break_detail, len(one.turns)) for one in trajectory.traces]


def whole(view: TraceView) -> list[int]:
    return [*view.prompt_ids.tolist(), *view.response_ids.tolist()]


THINKING: list[tuple[str, Message | None]] = [
    (
        "<think>\nThe sky, they said.\n</think>\n\nThe sky is blue.",
        {"role": "assistant", "content": "The sky is blue.", "reasoning": "The sky, they said."},
    ),
    ("The sea as well.", None),
]
OPENED: list[tuple[str, Message | None]] = [
    (THINKING[0][0].removeprefix("<think>\n"), THINKING[0][1]),
    ("No thought.\n</think>\n\nYes.", None),
]


@pytest.mark.parametrize("decode", [False, True])
def test_an_empty_thought_that_the_history_lacks_still_merges(tokenizer_file: Path, decode: bool) -> None:
    replies: list[tuple[str, Message | None]] = [("The sky is blue.", None), ("The s·ea, too.", None), ("Good.", None)]
    model, _, trajectory = built("no thinking", tokenizer_file, replies, decode=decode)
    assert found(trajectory) == [(None, None, 3)]
    (trace,) = trajectory.traces
    opens = len(model.tokens.encode(model.opens))
    assert [(one.turn, one.position, one.sampled, one.canonical) for one in trace.drift if one.position < 0] == [
        (0, -opens, opens, 0),
        (1, -opens, opens, 0),
    ]
    assert [turn.context for turn in trace.turns] == [Context.EXACT, Context.RETOKENIZED, Context.RETOKENIZED]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    ("template", "replies", "expected"),
    [
        ("thinking kept", THINKING, [(None, None, 2)]),
        ("thinking dropped", THINKING, [("history_changed", "template", 1), (None, None, 1)]),
        ("thinking opened and kept", OPENED, [(None, None, 2)]),
        ("thinking opened and dropped", OPENED, [("history_changed", "template", 1), (None, None, 1)]),
    ],
)
def test_thinking_merges_only_where_the_history_shows_it(
    tokenizer_file: Path, template: str, replies: Any, expected: Any, decode: bool
) -> None:
    _, session, trajectory = built(template, tokenizer_file, replies, decode=decode)
    assert found(trajectory) == expected
    for trace in trajectory.traces:
        for turn in trace.turns:
            true = next(one for one in session.truth if one.completion_id == turn.completion_id)
            assert whole(trajectory.view(trace))[: turn.start] == true.prompt or turn.context is Context.RETOKENIZED


def calling(arguments: str) -> Message:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("sampled", ['{"a":1,"b":[2,3]}', '{"a": 1, "b": [2, 3]}'])
def test_arguments_are_the_same_however_they_are_spaced(tokenizer_file: Path, sampled: str, decode: bool) -> None:
    text = f'<call>{{"name": "add", "arguments": {sampled}}}</call>'
    respace = lambda message: {  # noqa: E731 - one line says it
        **message,
        **({"tool_calls": calling(json.dumps(json.loads(sampled)))["tool_calls"]} if message.get("tool_calls") else {}),
    }
    replies: list[tuple[str, Message | None]] = [(text, calling(sampled)), ("Six.", None)]
    _, _, trajectory = built("plain", tokenizer_file, replies, decode=decode, echo=respace)
    assert found(trajectory) == [(None, None, 2)]


@pytest.mark.parametrize("decode", [False, True])
def test_a_call_that_the_template_leaves_out_breaks_the_chain(tokenizer_file: Path, decode: bool) -> None:
    text = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    replies: list[tuple[str, Message | None]] = [(text, calling('{"a": 1}')), ("Six.", None)]
    _, _, trajectory = built("calls dropped", tokenizer_file, replies, decode=decode)
    assert found(trajectory) == [("history_changed", "template", 1), (None, None, 1)]


def test_a_template_that_trims_is_seen_with_the_tokenizer_only(tokenizer_file: Path) -> None:
    replies: list[tuple[str, Message | None]] = [(" The sky is blue.", None), ("Yes.", None)]
    _, _, judged = built("trimmed", tokenizer_file, replies, decode=False)
    _, _, decoded = built("trimmed", tokenizer_file, replies, decode=True)
    assert found(judged) == [(None, None, 2)]
    assert found(decoded) == [("history_changed", "template", 1), (None, None, 1)]


@pytest.mark.parametrize("decode", [False, True])
def test_a_text_that_the_client_trims_is_not_the_text(tokenizer_file: Path, decode: bool) -> None:
    trims = lambda message: {**message, "content": message["content"].strip()}  # noqa: E731 - one line says it
    for text in (" The sky is blue.", "The sky is blue.\n\n"):
        replies: list[tuple[str, Message | None]] = [(text, None), ("Yes.", None)]
        _, _, trajectory = built("plain", tokenizer_file, replies, decode=decode, echo=trims)
        assert found(trajectory) == [("history_changed", "client", 1), (None, None, 1)]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("thinking trimmed and kept", [(None, None, 2)]),
        ("thinking as it came", [("history_changed", "template", 1), (None, None, 1)]),
    ],
)
def test_thinking_that_the_client_trims_merges_where_the_template_puts_the_lines_back(
    tokenizer_file: Path, template: str, expected: Any, decode: bool
) -> None:
    thought = "\nThe sky, they said.\n"
    message = {"role": "assistant", "content": "The sky is blue.", "reasoning": thought}
    replies: list[tuple[str, Message | None]] = [
        (f"<think>{thought}</think>\n\nThe sky is bl·ue.", message),
        ("The sea as well.", None),
    ]
    trims = lambda message: {**message, "reasoning": (message.get("reasoning") or "").strip()}  # noqa: E731 - as above
    _, _, trajectory = built(template, tokenizer_file, replies, decode=decode, echo=trims)
    assert found(trajectory) == expected


@pytest.mark.parametrize("decode", [False, True])
def test_a_line_that_the_template_adds_before_a_call_is_drift(tokenizer_file: Path, decode: bool) -> None:
    """Engines leave the line break before a call in the text, and templates write one of their own."""
    text = 'I add.\n<call>{"name": "add", "arguments": {"a": 1}}</call>'
    replies = [(text, {**calling('{"a": 1}'), "content": "I add.\n"}), ("Six.", None)]
    _, _, trajectory = built("a line before calls", tokenizer_file, replies, decode=decode)
    assert found(trajectory) == [(None, None, 2)]
    assert trajectory.traces[0].turns[1].context is Context.RETOKENIZED


def test_with_the_tokenizer_text_counts_and_not_how_a_client_writes_a_message(tokenizer_file: Path) -> None:
    replies: list[tuple[str, Message | None]] = [("T·he sky is blue.", None), ("Yes.", None)]
    renamed = lambda message: {**message, "name": "bot"}  # noqa: E731 - not shown by the template
    assert len(built("plain", tokenizer_file, replies, decode=False, echo=renamed)[2].traces) == 2
    _, _, trajectory = built("plain", tokenizer_file, replies, decode=True, echo=renamed)
    assert found(trajectory) == [(None, None, 2)]
    assert trajectory.traces[0].turns[1].context is Context.RETOKENIZED


@pytest.mark.parametrize("template", ["plain", "thinking kept"])
def test_a_traces_messages_render_to_its_text(tokenizer_file: Path, template: str) -> None:
    """What supervised fine-tuning needs: the OpenAI lists of a trace, through the template, are its tokens."""
    replies = [*THINKING, ("<call>" + '{"name": "add", "arguments": {"a": 1}}</call>', calling('{"a": 1}'))]
    replies = [*replies, ("Done.", None)] if template == "thinking kept" else [*replies[1:], ("Done.", None)]
    model, _, trajectory = built(template, tokenizer_file, replies, decode=False)
    (trace,) = trajectory.traces
    told = trajectory.messages(trace.prompt_messages) + trajectory.messages(trace.response_messages)
    rendered = list(model.tokens.render(told, add_generation_prompt=False))
    assert rendered[: len(whole(trajectory.view(trace)))] == whole(trajectory.view(trace))


def test_a_tokenizer_that_is_not_there_is_named(tokenizer_file: Path) -> None:
    session = Session(builder=BuilderSpec(config={"tokenizer": "0" * 64}))
    session.call([user("a")], Reply([11, 2], {"role": "assistant", "content": "b"}))
    session.close()
    trajectory = rebuild(session.records, tokenizers=Tokenizers([tokenizer_file]))
    assert trajectory.error is not None
    assert "POLAR_BUILDER_TOKENIZERS" in trajectory.error.message
    missing = rebuild(session.records, tokenizers=Tokenizers([tokenizer_file.parent / "gone.json"]))
    assert missing.error is not None
    assert "gone.json" in missing.error.message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('<call>{"a":1,"b":[1,2]}</call>', '<call>{"b": [1, 2], "a": 1.0}</call>'),
        ('{"arguments": "{\\"a\\":1}"}', '{"arguments": {"a": 1}}'),
        ('x {not json} {"a" : "\\u00e9"}', 'x {not json} {"a": "é"}'),
        ('So.\n<call>\n{"a": 1}\n</call>', 'So.\n\n<call>{"a": 1}</call>\n'),
        ('<call>{"a": 1}</call> <call>{"b": 2}</call>', '<call>{"a": 1}</call>\n\n<call>{"b": 2}</call>'),
        ('[TOOL_CALLS] {"a": 1}', '[TOOL_CALLS]{"a": 1}'),
    ],
)
def test_json_is_compared_by_what_it_says(one: str, other: str) -> None:
    assert respaced(one) == respaced(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ("a  b", "a b"),
        ("{", "{{"),
        ('{"a": 1}', ""),
        ('a  b <c>{"a": 1}</c>', 'a b <c>{"a": 1}</c>'),
        ('<c>{"a": 1}</c> a  b', '<c>{"a": 1}</c> a b'),
        ('{"a": "x  y"}', '{"a": "x y"}'),
        ("<a>\n\n<b>", "<a>\n<b>"),
    ],
)
def test_what_says_something_else_stays_different(one: str, other: str) -> None:
    assert respaced(one) != respaced(other)
