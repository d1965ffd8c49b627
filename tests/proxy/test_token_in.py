"""Token-in through a real proxy: every dialect, what falls back and why, what is measured in rendered mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import aiohttp
import openai
import pytest

from polar.devmodel import ChatTokenizer, Match, Reply, Rule, Script, ScriptedEngine
from polar.proxy.dialects import openai_chat
from polar.schemas import CompletionCaptured, CompletionFailed, Context
from tests.proxy import anthropic_harness
from tests.proxy.harness import Door
from tests.proxy.token_in_harness import built, goes_on, whole

Start = Callable[..., Any]
TEXTS = ("First, we look at the files of it.", "Then we change two of them, naïvely.", "It is done, and tested.", "No.")
ODD_CALL = Reply(ids=None, text="Let me look.\n", tool_calls=[{"name": "look", "arguments": '{"day":1.0,  "a":"b"}'}])
STRIPS_THINKING = """
{%- set last = namespace(user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' -}}
  {%- if m.role == 'assistant' and m.reasoning and loop.index0 > last.user -%}
    {{- '<think>\n' ~ m.reasoning.strip('\n') ~ '\n</think>\n\n' -}}
  {%- endif -%}
  {{- m.content.strip() ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""As Qwen3's: thinking stays until the user speaks again."""


def drifting(*texts: str, drift: int = 2, **more: Any) -> Script:
    """Says these texts, in ids that encoding them would not give."""
    return Script([Rule(replies=[Reply(text=text, drift=drift, **more) for text in texts or TEXTS])])


class Talk:
    """A client of one dialect without a library: what it is told goes back as it came."""

    def __init__(self, door: Door, http: aiohttp.ClientSession, dialect: str, key: str) -> None:
        self.dialect = dialect
        self.history: list[Any] = []
        self.tools = False
        self._url = door.url
        self._http = http
        self._key = key

    async def ask(self, text: str) -> None:
        if self.dialect == "google.generate_content":
            self.history.append({"role": "user", "parts": [{"text": text}]})
        else:
            self.history.append({"role": "user", "content": text})
        await self.go_on()

    async def answer(self, result: str) -> None:
        """Answer the last reply's tool call."""
        last = self.history[-1]
        if self.dialect == "anthropic.messages":
            use = next(block for block in last["content"] if block["type"] == "tool_use")
            result_block = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
            self.history.append({"role": "user", "content": [result_block]})
        elif self.dialect == "openai.chat":
            (call,) = last["tool_calls"]
            # as clients do that parse arguments and write them again
            call["function"]["arguments"] = '{"a": "b", "day": 1}'
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        elif self.dialect == "openai.responses":
            output = {"type": "function_call_output", "call_id": last["call_id"], "output": result}
            self.history.append(output)
        else:
            part = {"functionResponse": {"name": "look", "response": {"result": result}}}
            self.history.append({"role": "user", "parts": [part]})
        await self.go_on()

    async def go_on(self) -> None:
        schema = {"type": "object", "properties": {}}
        if self.dialect == "anthropic.messages":
            tools = {"tools": [{"name": "look", "input_schema": schema}]} if self.tools else {}
            body = {"model": "m", "max_tokens": 100, "messages": self.history, **tools}
            told = await self._post("/v1/messages", body, {"x-api-key": self._key})
            self.history.append({"role": "assistant", "content": told["content"]})
        elif self.dialect == "openai.chat":
            function = {"type": "function", "function": {"name": "look", "parameters": schema}}
            body = {"model": "m", "messages": self.history, **({"tools": [function]} if self.tools else {})}
            told = await self._post("/v1/chat/completions", body, {"Authorization": f"Bearer {self._key}"})
            self.history.append(told["choices"][0]["message"])
        elif self.dialect == "openai.responses":
            function = {"type": "function", "name": "look", "parameters": schema, "strict": False}
            tools = {"tools": [function]} if self.tools else {}
            body = {"model": "m", "store": False, "input": self.history, **tools}
            told = await self._post("/v1/responses", body, {"Authorization": f"Bearer {self._key}"})
            self.history += told["output"]
        else:
            declared = {"functionDeclarations": [{"name": "look", "parameters": {"type": "OBJECT", "properties": {}}}]}
            body = {"contents": self.history, **({"tools": [declared]} if self.tools else {})}
            told = await self._post("/v1beta/models/m:generateContent", body, {"x-goog-api-key": self._key})
            self.history.append(told["candidates"][0]["content"])

    async def _post(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        async with self._http.post(self._url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()


DIALECTS = ["anthropic.messages", "openai.chat", "openai.responses", "google.generate_content"]


def exact(calls: list[CompletionCaptured]) -> None:
    """Every call but the first goes on from the very tokens of the one before."""
    assert [one.capture for one in calls] == ["rendered", *["token_in"] * (len(calls) - 1)]
    assert [one.fallback for one in calls] == [None] * len(calls)
    for before, after in pairwise(calls):
        assert goes_on(before, after)
        assert (after.context_kind, after.drift) == ("append", 0)


async def said(client: openai.AsyncOpenAI, history: list[Any], question: str, **fields: Any) -> list[Any]:
    """One call; the history with question and reply."""
    asked = [*history, {"role": "user", "content": question}]
    answer = await client.chat.completions.create(model="m", messages=asked, **fields)
    return [*asked, answer.choices[0].message.model_dump(exclude_none=True)]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_goes_on_from_the_very_tokens(dialect: str, engine_of: Start, door_to: Start) -> None:
    engine: ScriptedEngine = await engine_of(drifting())
    door: Door = await door_to(engine)
    async with aiohttp.ClientSession() as http:
        for mode in ("token_in", "rendered"):
            talk = Talk(door, http, dialect, door.key(mode, capture=mode))
            for question in ("What is to be done?", "And then?", "Is that all?", "Sure?"):
                await talk.ask(question)
    calls = whole(await door.settled("token_in"))
    exact(calls)
    assert {one.dialect for one in calls} == {dialect}
    assert [one.tokens_in for one in engine.calls][:4] == [False, True, True, True]
    # what was sampled and told is the engine's own word for it
    for one, record in zip(engine.calls, calls, strict=False):
        assert one.prompt_ids == [*record.prompt.ids]
        assert one.ids == [[*record.choices[0].ids]]
    rendered = whole(await door.records("rendered"))
    assert {one.capture for one in rendered} == {"rendered"}
    assert [one.context_kind for one in rendered] == ["fresh", "append", "append", "append"]
    assert all(one.drift and one.drift <= 6 for one in rendered[1:])
    assert not any(goes_on(before, after) for before, after in pairwise(rendered))


async def test_the_builder_joins_the_calls_without_drift(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    for mode in ("token_in", "rendered"):
        async with door.client(mode, capture=mode) as client:
            history: list[Any] = []
            for question in ("What?", "And?", "So?", "Sure?"):
                history = await said(client, history, question)
    await door.settled()
    trajectory = await built(door, "token_in")
    assert trajectory.error is None
    (trace,) = trajectory.traces
    assert trace.drift == []
    assert [turn.context for turn in trace.turns] == [Context.EXACT] * 4
    assert [turn.trainable for turn in trace.turns] == [True] * 4
    (drifted,) = (await built(door, "rendered")).traces
    assert len(drifted.drift) == 3


async def test_a_client_that_leaves_ends_the_generation(engine_of: Start, door_to: Start) -> None:
    slow = Rule(match=Match(last_user="slow"), replies=[Reply(text="x", gate="never")])
    engine: ScriptedEngine = await engine_of(Script([slow, Rule(replies=[Reply(text="Fine.", drift=1)])]))
    door: Door = await door_to(engine)
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        asking = asyncio.create_task(said(client, history, "slow"))
        await engine.until(lambda stats: stats.running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await engine.until(lambda stats: stats.aborted == 1)
    _, last = [one for one in await door.settled() if isinstance(one, CompletionCaptured | CompletionFailed)]
    assert isinstance(last, CompletionFailed)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_tool_calls_that_come_back_in_other_words(dialect: str, engine_of: Start, door_to: Start) -> None:
    script = Script([Rule(match=Match(last_role="tool"), replies=[Reply(text="It rains.")]), Rule(replies=[ODD_CALL])])
    engine: ScriptedEngine = await engine_of(script)
    door: Door = await door_to(engine)
    async with aiohttp.ClientSession() as http:
        talk = Talk(door, http, dialect, door.key(capture="token_in"))
        talk.tools = True
        await talk.ask("How is the weather?")
        await talk.answer("rain")
        await talk.ask("Look again.")
        await talk.answer("sun")
    calls = whole(await door.settled())
    exact(calls)
    assert [one.choices[0].finish for one in calls] == ["tool_calls", "stop", "tool_calls", "stop"]
    first = calls[0].choices[0].message["tool_calls"][0]["function"]["arguments"]
    assert calls[2].choices[0].message["tool_calls"][0]["function"]["arguments"] == first
    text = engine.tokenizer.decode([*calls[-1].prompt.ids])
    assert text.count('{"day":1.0,  "a":"b"}') == 2, "as sampled, not as the template writes it"


async def test_a_streaming_client_is_told_the_same(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()), stream_mode="live")
    async with door.client(capture="token_in") as client:
        history: list[Any] = []
        for question in ("What?", "And?", "So?"):
            history.append({"role": "user", "content": question})
            stream = await client.chat.completions.create(
                model="m", messages=history, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            history.append({"role": "assistant", "content": text})
    async with anthropic_harness.client(door, "s2", capture="token_in") as other:
        talk: list[Any] = []
        for question in ("What?", "And?"):
            talk.append({"role": "user", "content": question})
            async with other.messages.stream(model="m", max_tokens=99, messages=talk) as told:
                message = await told.get_final_message()
            talk.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
    calls = whole(await door.settled())
    exact(calls)
    assert [one["content"] for one in history[1::2]] == list(TEXTS[:3])
    assert chunks[-1].usage.completion_tokens == len(calls[-1].choices[0].ids)
    assert chunks[-1].usage.prompt_tokens == len(calls[-1].prompt.ids)
    assert all(one.streamed for one in calls)
    exact(whole(await door.records("s2")))


async def test_a_reply_that_was_cut_gets_its_end_unsampled(engine_of: Start, door_to: Start) -> None:
    engine: ScriptedEngine = await engine_of(drifting(finish="length"))
    door: Door = await door_to(engine)
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        history = await said(client, history, "And?")
        await said(client, history, "So?")
    calls = whole(await door.settled())
    exact(calls)
    end = engine.tokenizer.encode("<|im_end|>\n")
    for before, after in pairwise(calls):
        at = len(before.prompt.ids) + len(before.choices[0].ids)
        assert [*after.prompt.ids][at : at + len(end)] == end


async def test_a_reply_that_runs_into_the_prompt_before_it(engine_of: Start, door_to: Start) -> None:
    # rendered, its first newlines and the template's are one token: the rendered prompt does not begin with the last
    engine: ScriptedEngine = await engine_of(drifting("\n\nYes.", "\nNo.", drift=0))
    door: Door = await door_to(engine)
    for mode in ("rendered", "token_in"):
        engine.forget()
        async with door.client(mode, capture=mode) as client:
            history = await said(client, [], "What?")
            await said(client, await said(client, history, "And?"), "So?")
    exact(whole(await door.settled("token_in")))
    rendered = whole(await door.records("rendered"))
    assert not rendered[1].prompt.ids.data.startswith(rendered[0].prompt.ids.data)
    assert [one.context_kind for one in rendered] == ["fresh", "append", "append"]
    assert rendered[1].drift


async def test_a_stop_string_stays_in_the_tokens(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting("One two three four five.", "Six seven.")))
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "Count.", stop=["thr", "sev"])
        assert history[-1]["content"] == "One two "
        history = await said(client, history, "More.", stop=["thr", "sev"])
        assert history[-1]["content"] == "Six "
        await said(client, history, "More.")
    calls = whole(await door.settled())
    exact(calls)
    assert [one.choices[0].stop for one in calls] == ["thr", "sev", None]


async def test_log_probabilities_and_choices_are_told_as_chat_tells_them(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    messages: list[Any] = [{"role": "user", "content": "What?"}]
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        messages = [*history, {"role": "user", "content": "And?"}]
        for top in (0, 2):
            reply = await client.chat.completions.create(
                model="m", messages=messages, n=2, logprobs=True, top_logprobs=top, seed=3, temperature=0.5
            )
            for choice in reply.choices:
                assert choice.logprobs is not None
                entries = choice.logprobs.content or []
                assert "".join(entry.token for entry in entries).removesuffix("<|im_end|>") == choice.message.content
                assert {len(entry.top_logprobs) for entry in entries} == {top}
        # the second choice is the one that the client goes on with
        other = reply.choices[1].message.model_dump(exclude_none=True)
        await said(client, [*messages, other], "So?")
    _, one, two, last = whole(await door.settled())
    for record in (one, two):
        assert record.capture == "token_in"
        assert [choice.index for choice in record.choices] == [0, 1]
        assert all(len(choice.ids) == len(choice.logprobs) for choice in record.choices)
        assert all(choice.spans for choice in record.choices)
    assert last.prompt.ids.data.startswith(two.prompt.ids.data + two.choices[1].ids.data)
    assert (last.capture, last.drift) == ("token_in", 0)


async def test_a_session_that_forks_goes_on_from_each_branch(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    async with door.client(capture="token_in") as client:
        first = await said(client, [], "What?")
        second = await said(client, first, "And?")
        await said(client, first, "Or rather?")
        await said(client, second, "So?")
        await said(client, [], "Something else entirely.")
    root, one, fork, two, fresh = whole(await door.settled())
    assert goes_on(root, one)
    assert goes_on(root, fork)
    assert goes_on(one, two)
    assert [call.context_kind for call in (one, fork, two, fresh)] == ["append", "append", "append", "fresh"]
    assert [call.drift for call in (one, fork, two, fresh)] == [0, 0, 0, None]


async def test_why_a_call_falls_back_is_on_the_record_and_counted(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    png = "data:image/png;base64,iVBORw0KGgo="
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        changed = [history[0], {"role": "assistant", "content": "Never said."}]
        await said(client, changed, "And?")
        await said(client, [{"role": "user", "content": "Who?"}, changed[1]], "And?")
        await said(client, history, "And?", tools=[tool])
        await said(client, history, "And?", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        await said(client, history, "And?", response_format={"type": "json_object"})
        shown = [*history, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": png}}]}]
        with pytest.raises(openai.BadRequestError):  # this model takes no images; with tokens it would not be asked
            await said(client, shown, "And?")
    calls = whole(await door.settled())
    reasons = [one.fallback for one in calls]
    assert reasons == [
        *(None, "history_changed", "not_remembered", "tools_changed", "template_changed", "constraint"),
    ]
    assert [one.context_kind for one in calls] == ["fresh", "rewrite", None, "append", "append", "append"]
    assert {one.capture for one in calls} == {"rendered"}
    counted = {
        name: door.service.registry.get_sample_value("polar_proxy_token_in_fallbacks_total", {"reason": name})
        for name in ("media", "tools_changed", "history_changed")
    }
    assert counted == {"media": 1.0, "tools_changed": 1.0, "history_changed": 1.0}


async def test_an_anthropic_prefill_is_rendered(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    async with anthropic_harness.client(door, capture="token_in") as client:
        prefill = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is"}]
        await client.messages.create(model="m", max_tokens=9, messages=prefill)
    (call,) = whole(await door.settled())
    assert (call.capture, call.fallback) == ("rendered", "prefill")


async def test_what_was_added_by_hand_is_rendered_after_the_exact_tokens(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()))
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        shown = [{"role": "user", "content": "Like so?"}, {"role": "assistant", "content": "Like so!"}]
        await said(client, [*history, *shown], "And?")
    one, two = whole(await door.settled())
    assert goes_on(one, two)
    assert (two.context_kind, two.drift, two.capture) == ("rewrite", 0, "token_in")


THOUGHTS = [
    Reply(text="Seven.", reasoning="Three and four, so seven.", drift=2),
    Reply(text="Eight.", reasoning="One more.", drift=1),
    Reply(text="Nine.", reasoning="And another.", drift=1),
]


@pytest.mark.parametrize("keep", ["as_template", "always"])
async def test_thinking_that_the_template_strips(
    keep: str, engine_of: Start, door_to: Start, tokenizer: ChatTokenizer
) -> None:
    thinker = ChatTokenizer(tokenizer.tokenizer, STRIPS_THINKING)
    engine: ScriptedEngine = await engine_of(Script([Rule(replies=THOUGHTS)]), tokenizer=thinker, reasoning=True)
    door: Door = await door_to(engine)
    async with door.client(capture="token_in", keep_reasoning=keep) as client:
        history = await said(client, [], "Three and four?")
        assert history[-1]["reasoning"].strip() == "Three and four, so seven."
        history = await said(client, history, "And one?")
        await said(client, history, "And one?")
    calls = whole(await door.settled())
    text = engine.tokenizer.decode([*calls[-1].prompt.ids])
    if keep == "always":
        exact(calls)
        assert text.count("<think>") == 2
        assert text.count("<|im_end|>") == 5
        assert text.endswith("<|im_start|>user\nAnd one?<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert [one.fallback for one in calls] == [None, "template_rewrote", "template_rewrote"]
        assert [one.context_kind for one in calls] == ["fresh", "append", "append"]
        assert all(one.drift for one in calls[1:])
        assert "<think>" not in text


async def test_thinking_that_the_harness_leaves_out(engine_of: Start, door_to: Start, tokenizer: ChatTokenizer) -> None:
    thinker = ChatTokenizer(tokenizer.tokenizer, STRIPS_THINKING)
    engine: ScriptedEngine = await engine_of(Script([Rule(replies=THOUGHTS)]), tokenizer=thinker, reasoning=True)
    door: Door = await door_to(engine)
    for keep in ("as_template", "always"):
        engine.forget()
        async with door.client(keep, capture="token_in", keep_reasoning=keep) as client:
            history: list[Any] = []
            for question in ("Three and four?", "And one?", "And one?"):
                history = await said(client, history, question)
                history[-1] = {name: history[-1][name] for name in ("role", "content")}
    await door.settled()
    followed = whole(await door.records("as_template"))
    assert [one.fallback for one in followed] == [None, "reasoning_dropped", "reasoning_dropped"]
    assert [one.context_kind for one in followed] == ["fresh", "rewrite", "rewrite"]
    assert all(one.drift for one in followed[1:])
    kept = whole(await door.records("always"))
    assert [one.capture for one in kept] == ["rendered", "token_in", "token_in"]
    assert all(goes_on(before, after) for before, after in pairwise(kept))


async def test_thinking_stays_while_tools_are_called(
    engine_of: Start, door_to: Start, tokenizer: ChatTokenizer
) -> None:
    call = Reply(reasoning="I look.", tool_calls=[{"name": "look", "arguments": {}}], drift=2)
    script = Script(
        [Rule(match=Match(last_role="tool"), replies=[Reply(text="Rain.", reasoning="Wet.")]), Rule(replies=[call])]
    )
    ends = "{{- m.content.strip() ~ '<|im_end|>\n' -}}"
    assert ends in STRIPS_THINKING
    calls = (
        "{{- m.content.strip() -}}{%- for c in m.tool_calls or [] -%}"
        "{{- '<tool_call>\n{\"name\": ' ~ (c.function.name | tojson) ~ ', \"arguments\": '"
        " ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    )
    template = STRIPS_THINKING.replace(ends, calls)
    thinker = ChatTokenizer(tokenizer.tokenizer, template)
    engine: ScriptedEngine = await engine_of(script, tokenizer=thinker, reasoning=True)
    door: Door = await door_to(engine)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "Weather?", tools=[tool])
        (asked,) = history[-1]["tool_calls"]
        history.append({"role": "tool", "tool_call_id": asked["id"], "content": "rain"})
        await client.chat.completions.create(model="m", messages=history, tools=[tool])
    exact(whole(await door.settled()))


async def test_an_engine_without_the_routes(engine_of: Start, door_to: Start) -> None:
    engine: ScriptedEngine = await engine_of(drifting(), scale_out=False)
    door: Door = await door_to(engine, capture_mode="token_in")
    async with door.client("asks", capture="token_in") as client:
        with pytest.raises(openai.BadRequestError, match="--enable-scale-out") as raised:
            await said(client, [], "What?")
        assert raised.value.code == "token_in_unsupported"
    (failed,) = [one for one in await door.settled("asks") if isinstance(one, CompletionFailed)]
    assert failed.http_status == 400
    async with door.client("leaves it to the proxy") as client:
        await said(client, await said(client, [], "What?"), "And?")
    calls = whole(await door.settled("leaves it to the proxy"))
    assert [(one.capture, one.fallback) for one in calls] == [("rendered", None), ("rendered", "engine")]
    async with door.client("does not", capture="rendered") as client:
        await said(client, await said(client, [], "What?"), "And?")
    assert {one.fallback for one in whole(await door.settled("does not"))} == {None}


async def test_the_proxys_setting_is_for_sessions_that_do_not_say(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()), capture_mode="token_in", delta_prompts=False)
    async with door.client() as client:
        await said(client, await said(client, [], "What?"), "And?")
    calls = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert [one.prompt.base for one in calls] == [None, None]
    exact(calls)


async def test_a_prompt_that_is_too_long_is_a_400_with_its_count(engine_of: Start, door_to: Start) -> None:
    engine: ScriptedEngine = await engine_of(drifting(), max_model_len=200)
    door: Door = await door_to(engine)
    long = "word " * 60
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        history = await said(client, history, long)
        with pytest.raises(openai.BadRequestError) as raised:
            await said(client, history, f"{long} {long}")
        assert raised.value.code == "context_length_exceeded"
        fits = await said(client, history, "word " * 20, max_completion_tokens=150)
    assert fits
    calls = whole(await door.settled())
    exact(calls)
    assert len(calls) == 3


async def test_room_is_what_the_exact_prompt_leaves(engine_of: Start, door_to: Start) -> None:
    # more ids than the rendered prompt has: the rendered one would fit, the exact one does not
    texts = "abcdefgh " * 12
    engine: ScriptedEngine = await engine_of(drifting(texts, "Short.", drift=30), max_model_len=260)
    door: Door = await door_to(engine)
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        first = whole(await door.records())[0]
        used = len(first.prompt.ids) + len(first.choices[0].ids)
        question = "word " * (260 - used - 6)
        with pytest.raises(openai.BadRequestError) as raised:
            await said(client, history, question)
    assert raised.value.code == "context_length_exceeded"
    assert "prompt" in str(raised.value)


async def test_a_broken_engine_is_no_capture(engine_of: Start, door_to: Start) -> None:
    damaged = Rule(match=Match(last_user="break"), replies=[Reply(text="x", finish="abort")])
    engine: ScriptedEngine = await engine_of(Script([damaged, Rule(replies=[Reply(text="Fine.", drift=1)])]))
    door: Door = await door_to(engine)
    async with door.client(capture="token_in") as client:
        history = await said(client, [], "What?")
        with pytest.raises(openai.InternalServerError):
            await said(client, history, "break")
        await said(client, history, "And?")
    calls = whole(await door.settled())
    assert [one.complete for one in calls] == [True, False, True]
    assert goes_on(calls[0], calls[2])


async def test_what_is_forgotten_is_not_gone_on_from(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(drifting()), history_sessions=1)
    async with door.client("one", capture="token_in") as client, door.client("two", capture="token_in") as other:
        history = await said(client, [], "What?")
        await said(other, [], "What?")
        await said(client, history, "And?")
    calls = whole(await door.settled("one"))
    assert [(one.context_kind, one.drift, one.fallback) for one in calls] == [
        ("fresh", None, None),
        (None, None, "not_remembered"),
    ]


def test_constraints_that_fall_back_are_those_that_dialects_mark() -> None:
    from polar.proxy.token_in.continuing import FORCED

    assert "grammar" in openai_chat.PASSED_ON.values()
    assert {"grammar", "forced_tool"} == FORCED
