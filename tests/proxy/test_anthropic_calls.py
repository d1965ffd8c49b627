"""Calls through the official client of Anthropic: what the client gets, and what is on the log."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import pytest

from polar.devmodel import ChatTokenizer, Match, Reply, Rule, Script
from polar.devmodel.errors import ApiError
from polar.schemas import CallStarted, CompletionCaptured, SamplingSpec
from tests.proxy.anthropic_harness import TOOLS, USER, client, events, fields, post
from tests.proxy.harness import Door, captured
from tests.proxy.test_anthropic_replies import sent_back
from tests.proxy.test_calls import CALLING, MODES, assert_as_sampled, without_ids

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]


async def test_a_whole_reply_is_told_and_captured(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny in Paris."))
    door: Door = await door_to(engine)
    async with client(door) as asking:
        raw = await asking.messages.with_raw_response.create(
            **fields(
                system="Be brief.", extra_body={"temperature": 0.3}, metadata={"user_id": '{"session_id": "mine"}'}
            )
        )
    reply = await raw.parse()
    record = captured(await door.settled())

    assert reply.content[0].type == "text"
    assert reply.content[0].text == "It is sunny in Paris."
    assert (reply.model, reply.role, reply.type) == ("claude-x", "assistant", "message")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.id == f"msg_{record.completion_id}"
    assert raw.headers["request-id"] == record.completion_id
    assert reply.usage.input_tokens == len(record.prompt.ids)
    assert reply.usage.output_tokens == len(record.choices[0].ids)

    assert_as_sampled(record, engine)
    assert (record.dialect, record.streamed, record.complete) == ("anthropic.messages", False, True)
    assert record.prompt.messages == [{"role": "system", "content": "Be brief."}, *USER]
    assert record.choices[0].message == {"role": "assistant", "content": "It is sunny in Paris."}
    assert (record.sampling_asked.temperature, record.sampling.temperature) == (0.3, 1.0)
    assert record.sampling.max_tokens == 200
    assert record.hints.session == "mine"
    assert record.hints.user_agent is not None
    assert engine.calls[0].body["model"] == "scripted"


REPLIES = {
    "text": Reply(text="One. Two. Three. ☀️", tokens_per_chunk=2),
    "empty": Reply(text=""),
    "calls": CALLING,
    "call without text": Reply(tool_calls=CALLING.tool_calls[:1]),
    "call after white space": Reply(text="\n", tool_calls=CALLING.tool_calls[:1]),
    "no arguments": Reply(tool_calls=[{"name": "get_weather", "arguments": {}}]),
    "reasoning": Reply(reasoning="Hm, weather.", text="Sunny."),
    "reasoning and calls": Reply(reasoning="Hm.", text="Let me look.", tool_calls=CALLING.tool_calls),
    "reasoning and a call": Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
    "length": Reply(text="One. Two.", finish="length"),
    "white space only": Reply(text=" \n "),
    "drifted": Reply(text="One. Two. Three.", drift=2),
}


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("name", REPLIES)
async def test_live_synthetic_and_whole_agree(name: str, display: Any, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[REPLIES[name]])]), reasoning="reasoning" in name)
    results, records = [], []
    for mode in (*MODES, "whole"):
        door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
        asked = fields(tools=TOOLS, thinking={"type": "adaptive", "display": display})
        async with client(door, mode) as asking:
            if mode == "whole":
                message = await asking.messages.create(**asked)
            else:
                async with asking.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
        results.append(plain(message))
        record = captured(await door.settled(mode))
        assert_as_sampled(record, engine)
        assert_sent_back(message, record)
        records.append(record)
    assert results[0] == results[1] == results[2]
    assert results[0]["usage"]["input_tokens"] == len(records[0].prompt.ids)
    for record in records:
        choice, first = record.choices[0], records[0].choices[0]
        assert (choice.ids, choice.logprobs, choice.finish) == (first.ids, first.logprobs, first.finish)
        assert without_ids(choice.message) == without_ids(first.message)
        assert record.prompt == records[0].prompt
        assert (record.sampling, record.usage) == (records[0].sampling, records[0].usage)


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """What a client gets, without what differs from answer to answer."""
    dumped = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in dumped["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return dumped


def assert_sent_back(message: anthropic.types.Message, record: CompletionCaptured) -> None:
    """What the client would send back is the message that was captured."""
    back = sent_back({"content": [block.model_dump(exclude_none=True) for block in message.content]})
    assert back == record.choices[0].message


async def test_a_conversation_with_tools_extends_its_prompts(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script(
            [
                Rule(match=Match(turn=2), replies=[Reply(text="Sunny.")]),
                Rule(replies=[Reply(tool_calls=CALLING.tool_calls)]),
            ]
        )
    )
    door: Door = await door_to(engine, delta_prompts=False)
    messages: list[Any] = list(USER)
    async with client(door) as asking:
        async with asking.messages.stream(**fields(messages=messages, tools=TOOLS)) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        uses = [block for block in first.content if block.type == "tool_use"]
        assert [use.input for use in uses] == [{"city": "Paris"}, {"city": "Lyon {}"}]
        messages.append({"role": "assistant", "content": first.content})
        results: list[Any] = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]})
        second = await asking.messages.create(**fields(messages=messages, tools=TOOLS))
    assert second.content[0].type == "text"
    ends = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert [message["role"] for message in ends[1].prompt.messages] == ["user", "assistant", "tool", "tool", "user"]
    assert ends[1].prompt.messages[1] == ends[0].choices[0].message
    assert ends[0].prompt.tools_sha256 == ends[1].prompt.tools_sha256
    before = ends[0].prompt.ids.array.tolist() + ends[0].choices[0].ids.array.tolist()
    assert ends[1].prompt.ids.array.tolist()[: len(before)] == before


@pytest.mark.parametrize("hidden", [False, True])
async def test_thinking_that_comes_back_renders_to_the_same_prompt(
    hidden: bool, engine_of: Start, door_to: Start
) -> None:
    script = Script([Rule(replies=[Reply(reasoning="Hm.", text="Sunny."), Reply(text="Bye.")])])
    door: Door = await door_to(await engine_of(script, reasoning=True), delta_prompts=False)
    thinking: Any = {"type": "adaptive", "display": "omitted" if hidden else "summarized"}
    async with client(door) as asking:
        first = await asking.messages.create(**fields(thinking=thinking))
        block = first.content[0]
        assert block.type == "thinking"
        assert block.thinking.strip() == ("" if hidden else "Hm.")
        history: list[Any] = [*USER, {"role": "assistant", "content": first.content}, *USER]
        await asking.messages.create(**fields(messages=history, thinking=thinking))
    ends = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert ends[1].prompt.messages[1] == ends[0].choices[0].message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_told(stream: bool, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("One. Two. Three.")))
    async with client(door) as asking:
        asked = fields(stop_sequences=["Two", "Nine"])
        if stream:
            async with asking.messages.stream(**asked) as told:
                message = await told.get_final_message()
        else:
            message = await asking.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Two")
    assert message.content[0].type == "text"
    assert message.content[0].text == "One. "
    assert captured(await door.settled()).choices[0].stop == "Two"


async def test_max_tokens_cut_a_reply(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("One two three four five six seven eight.")))
    async with client(door) as asking:
        message = await asking.messages.create(**fields(max_tokens=3))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


async def test_the_assistants_last_words_are_gone_on_with(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Paris."))
    door: Door = await door_to(engine)
    async with client(door) as asking:
        history = [*USER, {"role": "assistant", "content": "The city is"}]
        message = await asking.messages.create(**fields(messages=history))
        count = await asking.messages.count_tokens(model="m", messages=history)
    assert message.content[0].type == "text"
    assert message.content[0].text == "Paris."
    record = captured(await door.settled())
    assert count.input_tokens == len(record.prompt.ids)
    assert engine.calls[0].body["continue_final_message"] is True


async def test_tokens_are_counted_without_a_generation(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    asked: dict[str, Any] = {"model": "m", "messages": USER, "system": "Be brief.", "tools": TOOLS}
    async with client(door) as asking:
        raw = await asking.messages.with_raw_response.count_tokens(**asked)
        count = (await raw.parse()).input_tokens
        assert raw.headers["request-id"]
        assert engine.stats.started == 0
        assert await door.settled() == []
        message = await asking.messages.create(**asked, max_tokens=10)
    assert count == message.usage.input_tokens == len(engine.calls[0].prompt_ids)
    assert door.service.slots.taken == 0


async def test_where_the_key_may_stand(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    clients = [
        anthropic.AsyncAnthropic(base_url=f"{door.url}/s/{door.key()}", api_key="anything", max_retries=0),
        anthropic.AsyncAnthropic(base_url=door.url, auth_token=door.key(), api_key=None, max_retries=0),
        anthropic.AsyncAnthropic(base_url=door.url, api_key=door.key(), max_retries=0),
    ]
    for asking in clients:
        async with asking:
            assert (await asking.messages.create(**fields())).stop_reason == "end_turn"
            assert (await asking.messages.count_tokens(model="m", messages=USER)).input_tokens > 0
            assert [model.id async for model in asking.models.list()] == ["the-policy"]


async def test_models_are_told_in_the_form_of_who_asks(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=4096))
    async with client(door) as asking, door.client() as other:
        await asking.messages.create(**fields())  # the engine is known then
        model = await asking.models.retrieve("claude-any")
        assert (model.id, model.type, model.max_input_tokens, model.lifecycle) == (
            "claude-any",
            "model",
            4096,
            "active",
        )
        assert (await other.models.retrieve("any")).object == "model"


async def test_beta_requests_are_the_same(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with client(door) as asking:
        message = await asking.beta.messages.create(
            **fields(
                betas=["context-management-2025-06-27"],
                context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            )
        )
        assert message.stop_reason == "end_turn"
        count = await asking.beta.messages.count_tokens(model="m", messages=USER)
    assert count.input_tokens == message.usage.input_tokens


async def test_a_schema_for_the_reply_is_marked_as_a_grammar(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say('{"a": 1}'))
    door: Door = await door_to(engine)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with client(door) as asking:
        await asking.messages.create(**fields(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert engine.calls[0].body["response_format"]["json_schema"]["schema"] == schema
    assert captured(await door.settled()).constraints == ["grammar"]


async def test_the_task_pins_sampling_unless_it_allows(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    async with client(door, sampling=SamplingSpec(override="allow", max_tokens=50)) as asking:
        await asking.messages.create(**fields(extra_body={"temperature": 0.5, "top_k": 40}))
    body = engine.calls[0].body
    assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (0.5, 40, 50)


@pytest.mark.parametrize("template", ["fine", "strict", "deaf"])
@pytest.mark.parametrize("setting", ["auto", "keep", "fold"])
async def test_late_system_messages_go_where_the_template_takes_them(
    template: str, setting: str, tokenizer: ChatTokenizer, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."), tokenizer=Template(tokenizer, template))
    door: Door = await door_to(engine, late_system=setting, delta_prompts=False)
    sent: list[Any] = [*USER, {"role": "system", "content": "Environment"}]
    async with client(door, "a") as asking:
        if (template, setting) == ("strict", "keep"):
            with pytest.raises(anthropic.BadRequestError, match="at the beginning"):
                await asking.messages.create(**fields(messages=sent))
            return
        count = (await asking.messages.count_tokens(model="m", messages=sent)).input_tokens
        message = await asking.messages.create(**fields(messages=sent))
    record = captured(await door.settled("a"))
    if setting == "fold" or (template, setting) in (("strict", "auto"), ("deaf", "auto")):
        parts = [USER[0]["content"], "<system-reminder>\nEnvironment\n</system-reminder>"]
        assert [part["text"] for part in record.prompt.messages[0]["content"]] == parts
    else:
        assert record.prompt.messages == sent
    assert count == message.usage.input_tokens == len(record.prompt.ids)


class Template(ChatTokenizer):
    """The tests' tokenizer with a template that refuses late system messages (strict) or leaves them out (deaf)."""

    def __init__(self, like: ChatTokenizer, kind: str) -> None:
        self.__dict__.update(like.__dict__)
        self._kind = kind

    def render(self, messages: Any, *args: Any, **more: Any) -> list[int]:
        late = any(message["role"] == "system" for message in messages[1:])
        if late and self._kind == "strict":
            raise ApiError("System message must be at the beginning.")
        if late and self._kind == "deaf":
            messages = [message for i, message in enumerate(messages) if not i or message["role"] != "system"]
        return super().render(messages, *args, **more)


async def test_dropped_tools_are_counted(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    tools = [*TOOLS, {"type": "web_search_20260318", "name": "web_search"}]
    async with client(door) as asking:
        await asking.messages.create(**fields(tools=tools))
    assert [tool["function"]["name"] for tool in engine.calls[0].body["tools"]] == ["get_weather"]
    labels = {"dialect": "anthropic.messages"}
    assert door.service.registry.get_sample_value("polar_proxy_dropped_total", labels) == 1


async def test_the_synchronous_client_works_too(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))

    def ask() -> list[str]:
        asking = anthropic.Anthropic(base_url=door.url, api_key=door.key(), max_retries=0)
        with asking, asking.messages.stream(**fields()) as stream:
            return list(stream.text_stream)

    assert "".join(await asyncio.to_thread(ask)) == "Yes."


async def test_an_image_is_refused_clearly_by_a_model_without_eyes(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    data = base64.b64encode(b"picture").decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    async with client(door) as asking:
        with pytest.raises(anthropic.BadRequestError, match="multimodal"):
            await asking.messages.create(**fields(messages=[{"role": "user", "content": [picture]}]))


async def test_events_are_those_of_the_provider(engine_of: Start, door_to: Start) -> None:
    reply = Reply(text="Let me look.", tool_calls=CALLING.tool_calls[:1])
    door: Door = await door_to(await engine_of(Script([Rule(replies=[reply])])))
    async with aiohttp.ClientSession() as http, post(door, http, stream=True, tools=TOOLS) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        told = [event async for event in events(response)]
        assert response.headers["request-id"] in told[0]["message"]["id"]
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    tail = ["content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    assert kinds[-5:] == tail
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == [0, 1]
    starts = [one for one in await door.settled() if isinstance(one, CallStarted)]
    assert [one.dialect for one in starts] == ["anthropic.messages"]
