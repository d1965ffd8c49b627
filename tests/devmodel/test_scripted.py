"""The scripted engine does what its script says, down to broken connections, and tells what happened."""

import asyncio
import json
import time

import aiohttp
import pytest

from polar.devmodel import ChatTokenizer, Failure, Match, Reply, Rule, Script, ScriptedEngine
from polar.devmodel.scripted import made_up_logprobs
from polar.devmodel.tamper import DAMAGES

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Client:
    def __init__(self, engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
        self.engine, self.http = engine, http

    def body(self, text="hi", **fields):
        asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        return {"model": "scripted", "messages": [{"role": "user", "content": text}], **asked, **fields}

    def post(self, text="hi", headers=None, **fields):
        return self.http.post(
            f"{self.engine.base_url}/chat/completions", json=self.body(text, **fields), headers=headers
        )

    async def chat(self, text="hi", headers=None, **fields):
        async with self.post(text, headers, **fields) as answer:
            return answer.status, await answer.json()

    async def content(self, text="hi", **fields):
        _, answer = await self.chat(text, **fields)
        return answer["choices"][0]["message"]["content"]

    async def stream(self, text="hi", **fields):
        async with self.post(text, stream=True, **fields) as answer:
            return [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def serve(http):
    """Start an engine from rules; every engine is closed at the end."""
    engines: list[ScriptedEngine] = []

    async def start(*rules, script=None, **options) -> Client:
        engine = ScriptedEngine(script or Script(rules), **options)
        engines.append(await engine.__aenter__())
        return Client(engine, http)

    yield start
    for engine in engines:
        await engine.__aexit__(None, None, None)


async def test_first_rule_that_matches_gives_its_replies_in_order(serve):
    client = await serve(
        Rule(name="twice", match=Match(last_user="weather"), replies=[Reply(text="one"), Reply(text="two")]),
        Rule(match=Match(last_user="wea"), replies=[Reply(text="never")]),
        Rule(match=Match(last_role="tool"), replies=[Reply(text="after a tool")]),
        Rule(match=Match(headers={"X-Agent": "^sub"}), replies=[Reply(text="sub-agent")]),
        Rule(match=lambda view: view.turn == 3, replies=[lambda view: Reply(text=f"turn {view.turn}")]),
    )
    assert [await client.content("weather?") for _ in range(3)] == ["one", "two", "two"]
    tool = [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "b"}]
    assert await client.content(messages=tool) == "after a tool"
    _, answer = await client.chat(headers={"X-Agent": "sub-1"})
    assert answer["choices"][0]["message"]["content"] == "sub-agent"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    assert await client.content(messages=turns) == "turn 3"
    assert [record.rule for record in client.engine.calls][:3] == ["twice"] * 3


async def test_a_rule_with_times_is_passed_over_afterwards(serve):
    client = await serve(Rule(replies=[Reply(error=Failure(status=503))], times=2), Rule(replies=[Reply(text="up")]))
    assert [(await client.chat())[0] for _ in range(3)] == [503, 503, 200]


async def test_calls_are_counted_by_key(serve):
    script = Script([Rule(match=Match(call=2), replies=[Reply(text="second")])], key="header:X-Session-ID")
    client = await serve(script=script)
    for session in ("a", "b", "a"):
        await client.chat(headers={"X-Session-ID": session})
    assert [(record.key, record.call) for record in client.engine.calls] == [("a", 1), ("b", 1), ("a", 2)]
    assert client.engine.calls[2].rule == "0"


async def test_default_answers_depend_on_prompt_and_seed_only(serve):
    first, second = await serve(), await serve()
    asked = [("a", 1), ("b", 1), ("a", 2), ("c", 3)]
    said = [await first.content(text, seed=seed) for text, seed in asked]
    assert said == [await second.content(text, seed=seed) for text, seed in asked]
    assert len(set(said)) > 1


async def test_log_probabilities_are_made_up_but_the_same_everywhere(serve):
    client = await serve(Rule(replies=[Reply(text="Hello there, friend.")]))
    _, answer = await client.chat()
    (choice,) = answer["choices"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert told == made_up_logprobs(answer["prompt_token_ids"], choice["token_ids"])
    assert all(value < 0 for value in told)
    assert told != made_up_logprobs([*answer["prompt_token_ids"], 5], choice["token_ids"])


@pytest.mark.parametrize("raw", [False, True])
async def test_temperature_moves_processed_log_probabilities_only(serve, raw):
    client = await serve(Rule(replies=[Reply(text="Hello there, friend.")]), raw_logprobs=raw)
    told = []
    for temperature in (1.0, 0.5, 0.0):
        _, answer = await client.chat(temperature=temperature)
        told.append([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
    assert (told[0] == told[1]) is raw
    assert told[0] == told[2]


async def test_forgetting_starts_a_script_over(serve):
    client = await serve(script=Script.say("one", "two"))
    assert [await client.content() for _ in range(2)] == ["one", "two"]
    client.engine.forget()
    assert (client.engine.calls, await client.content()) == ([], "one")


async def test_a_port_in_use_leaves_nothing_running(serve):
    client = await serve()
    port = int(client.engine.url.rpartition(":")[2])
    with pytest.raises(OSError, match="address already in use"):
        await serve(port=port)


async def test_tool_calls_are_sampled_in_hermes_form_and_told_parsed(serve):
    calls = [{"name": "look", "arguments": {"at": "naïve 😀"}}, {"name": "look", "arguments": '{"at":1}'}]
    client = await serve(Rule(replies=[Reply(text="Let me see.", tool_calls=calls)]))
    _, answer = await client.chat(tools=TOOLS)
    (choice,) = answer["choices"]
    told = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert (told, choice["finish_reason"]) == ([{"at": "naïve 😀"}, {"at": 1}], "tool_calls")
    text = client.engine.tokenizer.decode(choice["token_ids"], skip_special=True)
    assert text.count("<tool_call>") == 2

    chunks = await client.stream(tools=TOOLS)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    streamed = dict.fromkeys((0, 1), "")
    for delta in deltas:
        streamed[delta["index"]] += delta["function"].get("arguments", "")
    assert [json.loads(streamed[0]), json.loads(streamed[1])] == told
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert ids == choice["token_ids"]


async def test_a_sampled_turn_renders_back_as_sampled(serve):
    reply = Reply(text="I look.", tool_calls=[{"name": "look", "arguments": {"at": "x"}}])
    client = await serve(Rule(replies=[reply]))
    _, first = await client.chat(tools=TOOLS)
    message = {key: first["choices"][0]["message"][key] for key in ("role", "content", "tool_calls")}
    message["content"] = message["content"].removesuffix("\n")
    history = [{"role": "user", "content": "hi"}, message, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
    _, second = await client.chat(messages=history, tools=TOOLS)
    before = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before


async def test_drift_keeps_the_text_and_changes_the_ids(serve):
    client = await serve(
        Rule(times=1, replies=[Reply(text="several ordinary words here")]),
        Rule(replies=[Reply(text="several ordinary words here", drift=2)]),
    )
    _, plain = await client.chat()
    _, drifted = await client.chat()
    one, two = plain["choices"][0], drifted["choices"][0]
    assert one["message"]["content"] == two["message"]["content"]
    assert len(two["token_ids"]) == len(one["token_ids"]) + 2
    tokenizer = client.engine.tokenizer
    assert tokenizer.decode(two["token_ids"]) == tokenizer.decode(one["token_ids"])
    assert tokenizer.encode(tokenizer.decode(two["token_ids"])) == one["token_ids"]


async def test_reasoning_comes_in_its_own_field(serve):
    client = await serve(Rule(replies=[Reply(text="Blue.", reasoning="The sky…")]), reasoning=True)
    _, answer = await client.chat()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("\nThe sky…\n", "\n\nBlue.")
    deltas = [chunk["choices"][0]["delta"] for chunk in await client.stream()]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "\nThe sky…\n"
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nBlue."


@pytest.mark.parametrize("finish", ["length", "abort", "repetition", "error"])
async def test_other_endings_have_no_end_of_turn_token(serve, finish):
    client = await serve(Rule(replies=[Reply(text="cut", finish=finish)]))
    _, answer = await client.chat()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == finish
    assert client.engine.tokenizer.eos_id not in choice["token_ids"]


async def test_errors_are_answered_with_status_headers_and_body(serve):
    failure = Failure(status=429, message="slow down", type="TooManyRequests", headers={"Retry-After": "7"})
    client = await serve(Rule(replies=[Reply(error=failure)]))
    async with client.post(stream=True) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        error = (await answer.json())["error"]
    assert error == {"message": "slow down", "type": "TooManyRequests", "param": None, "code": 429}
    assert client.engine.calls[0].outcome == "failed"


async def test_an_error_inside_a_stream_comes_as_an_event(serve):
    client = await serve(Rule(replies=[Reply(text="one two three four", error=Failure(after=2))]))
    chunks = await client.stream()
    assert chunks[-1]["error"]["code"] == 500
    assert sum(len(chunk["choices"][0].get("token_ids") or []) for chunk in chunks[:-1]) == 2
    assert (client.engine.stats.failed, client.engine.stats.finished) == (1, 0)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_cut_connection_breaks_the_stream(serve, reset):
    client = await serve(Rule(replies=[Reply(text="one two three four", disconnect_after=2, reset=reset)]))
    with pytest.raises(aiohttp.ClientError):
        await client.stream()
    await client.engine.until(lambda stats: stats.failed == 1)
    assert client.engine.calls[0].outcome == "failed"


async def test_a_connection_cut_before_the_headers_has_no_answer(serve):
    client = await serve(Rule(replies=[Reply(disconnect_after=0)]))
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await client.chat()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_is_counted_as_aborted(serve, streamed):
    client = await serve(Rule(replies=[Reply(text="one two three four", gate="never", gate_after=2)]))
    engine = client.engine
    call = asyncio.create_task(client.stream() if streamed else client.chat())
    await engine.until(lambda stats: stats.running == 1)
    call.cancel()
    await engine.until(lambda stats: stats.aborted == 1)
    assert (engine.stats.running, engine.calls[0].outcome) == (0, "aborted")


async def test_a_gate_holds_a_reply_until_it_is_opened(serve):
    client = await serve(Rule(replies=[Reply(text="one two three", gate="go", gate_after=1)]))
    async with client.post(stream=True) as answer:
        lines = [await answer.content.readline() for _ in range(3)]
        assert json.loads(lines[2][6:])["choices"][0]["delta"]["content"] == "one"
        assert client.engine.stats.running == 1
        client.engine.open("go")
        assert b"[DONE]" in await answer.read()


async def test_versions_are_told_as_spans(serve):
    client = await serve(Rule(replies=[Reply(text="one two three", versions=[("v1", 2), ("v2", 0)])]))
    _, answer = await client.chat(return_weight_versions=True)
    (choice,) = answer["choices"]
    end = len(choice["token_ids"])
    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": end}]
    assert choice["weight_versions"] == spans


@pytest.mark.parametrize("damage", list(DAMAGES))
async def test_every_damage_leaves_an_answer_that_must_be_refused(serve, damage):
    client = await serve(Rule(replies=[Reply(text="one two", damage=damage)]))
    async with client.post() as answer:
        text = await answer.text()
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        assert damage == "not_json"
        return
    (choice,) = body["choices"]
    logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
    whole = len(choice.get("token_ids") or []) == len(logprobs) > 0 and all(value <= 0 for value in logprobs)
    assert not (whole and body.get("prompt_token_ids") and choice["finish_reason"])


async def test_pause_aborts_and_holds_new_calls_until_resume(serve):
    client = await serve(Rule(times=1, replies=[Reply(text="one two three", gate="never", gate_after=1)]))
    engine, url = client.engine, client.engine.url
    first = asyncio.create_task(client.chat())
    await engine.until(lambda stats: stats.running == 1)
    async with client.http.post(f"{url}/pause") as answer:
        assert await answer.json() == {"status": "paused"}
    _, cut = await first
    assert cut["choices"][0]["finish_reason"] == "abort"
    later = asyncio.create_task(client.chat())
    async with client.http.get(f"{url}/is_paused") as answer:
        assert await answer.json() == {"is_paused": True}
    assert not later.done()
    async with client.http.post(f"{url}/resume") as answer:
        assert answer.status == 200
    assert (await later)[0] == 200


async def test_a_kept_pause_changes_the_version_inside_a_generation(serve):
    client = await serve(Rule(replies=[Reply(text="one two three four", gate="go", gate_after=2)]))
    engine = client.engine
    async with client.post(stream=True, return_weight_versions=True) as answer:
        for _ in range(5):
            await answer.content.readline()
        for path, body in (("pause?mode=keep", None), ("update_weight_version", {"new_version": "7"})):
            async with client.http.post(f"{engine.url}/{path}", json=body) as done:
                assert done.status == 200
        engine.open("go")
        async with client.http.post(f"{engine.url}/resume"):
            pass
        events = (await answer.text()).split("\n\n")
    spans = json.loads(events[-3][6:])["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "7"]
    assert spans[0]["end"] == spans[1]["start"]


async def test_paused_engine_of_the_newer_kind_refuses(serve):
    client = await serve(refuse_when_paused=True)
    await client.engine.lifecycle.pause("wait")
    assert (await client.chat())[0] == 503


async def test_a_key_is_asked_for_where_one_is_set(serve):
    client = await serve(api_key="secret")
    assert await client.chat() == (401, {"error": "Unauthorized"})
    status, _ = await client.chat(headers={"Authorization": "Bearer secret"})
    assert status == 200


async def test_many_sessions_at_once_are_quick(serve):
    client = await serve()
    started = time.monotonic()
    answers = await asyncio.gather(*(client.stream(f"question {i}") for i in range(100)))
    assert all(answer[-1]["choices"][0]["finish_reason"] == "stop" for answer in answers)
    assert client.engine.stats.finished == 100
    assert time.monotonic() - started < 20  # 0.2 s on an idle machine


def test_scripts_are_read_from_json_and_mistakes_are_named(tmp_path):
    file = tmp_path / "script.json"
    file.write_text('{"rules": [{"match": {"last_user": "a"}, "reply": {"error": {"status": 500}}}], "key": "all"}')
    (rule,) = Script.read(file).rules
    assert rule.replies[0].error == Failure(status=500)
    for wrong, named in (
        ({"rulez": []}, "rulez"),
        ({"rules": [{"reply": {"txt": "a"}}]}, "txt"),
        ({"rules": [{"match": {"user": "a"}}]}, "user"),
        ({"rules": [{"replies": []}]}, "at least one reply"),
    ):
        with pytest.raises(ValueError, match=named):
            Script.parse(wrong)


def test_bundled_tokenizer_is_whole():
    chat = ChatTokenizer.small()
    text = "def f(x): return x + 42  # naïve 😀\n<tool_call>"
    assert chat.decode(chat.encode(text)) == text
    assert (chat.eos_id, chat.vocabulary) == (2, 4096)
