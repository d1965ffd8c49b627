"""OpenAI Chat Completions (https://platform.openai.com/docs/api-reference/chat).

Promises: a request is checked field by field and refused in OpenAI's shape; the conversation is normalized, so that the
same history gives the same messages whatever form a client sent it in; a stream and a whole reply say the same. Fields
nobody here knows are passed over and counted. Pure translation: no I/O, no clock, no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from polar.schemas import Sampling

from ..calls import Call, Delta, Entry, Json, Reply, ReplyChoice, ToolDelta
from ..errors import BadRequest, ProxyError
from .base import Dialect, Limits, StreamEncoder, Told, json_object

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
FINISHES = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "content_filter": "content_filter"}
EMPTY_CHUNK_EACH = 8
"""Every so many keep-alives is an empty chunk: a comment does not reset the idle timer of one client (qwen-code)."""

PASSED_ON = {
    "parallel_tool_calls": None,
    "chat_template_kwargs": None,
    "reasoning_effort": None,
    "stop_token_ids": None,
    "logit_bias": "logit_bias",
    "structured_outputs": "grammar",
    "thinking_token_budget": "thinking_budget",
    "min_tokens": "min_tokens",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_tokens",
}
"""Fields that go to the engine as they are, and what each does to the tokens."""

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "modalities",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields of OpenAI's that change nothing here, and are not worth a warning."""

UNSUPPORTED = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "this endpoint answers with text",
}

STATUS_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """The fields that are read; None is as good as absent everywhere."""

    model: str
    messages: list[Json]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: Json | None = None


_READ = frozenset(field.name for field in msgspec.structs.fields(_Body))


class OpenAIChat(Dialect):
    """The dialect `openai.chat`."""

    name = "openai.chat"

    def parse(self, body: bytes, limits: Limits) -> Call:
        raw = json_object(body)
        for name, instead in UNSUPPORTED.items():
            if raw.get(name) is not None:
                raise BadRequest(f"`{name}` is not supported: {instead}.", param=name, code="unsupported_parameter")
        try:
            read = msgspec.convert(raw, _Body)
        except msgspec.ValidationError as error:
            raise _wrong(error) from None
        tools = _tools(read.tools)
        extras, marks = _extras(raw, read, tools)
        asked = _asked(read, limits)
        top = read.top_logprobs or 0
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise BadRequest(f"`top_logprobs` lies between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")
        if top and not read.logprobs:
            raise BadRequest("`top_logprobs` goes with `logprobs` only.", param="top_logprobs")
        if not read.messages:
            raise BadRequest("`messages` is empty.", param="messages")
        return Call(
            dialect=self.name,
            model=read.model,
            messages=[_message(message, i) for i, message in enumerate(read.messages)],
            tools=tools,
            extras=extras,
            asked=asked,
            n=asked.n or 1,
            stream=bool(read.stream),
            include_usage=bool(read.stream_options is not None and read.stream_options.include_usage),
            logprobs=bool(read.logprobs),
            top_logprobs=top,
            constraints=tuple(marks),
            unknown=len(raw.keys() - _READ - PASSED_ON.keys() - WITHOUT_EFFECT - UNSUPPORTED.keys()),
        )

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        body = {
            "id": _id(told),
            "object": "chat.completion",
            "created": told.created,
            "model": told.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": _told_message(choice.message),
                    "logprobs": _logprobs(choice.entries) if call.logprobs else None,
                    "finish_reason": _finish(choice),
                }
                for choice in reply.choices
            ],
            "usage": _usage(reply),
            "system_fingerprint": reply.fingerprint,
        }
        return msgspec.json.encode(body)

    def stream(self, call: Call, told: Told) -> StreamEncoder:
        return _Encoder(call, told)

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        kind = STATUS_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class _Encoder(StreamEncoder):
    """Chunks of one streamed reply."""

    def __init__(self, call: Call, told: Told) -> None:
        self._call = call
        self._head: Json = {
            "id": _id(told),
            "object": "chat.completion.chunk",
            "created": told.created,
            "model": told.model,
        }
        self._begun: set[int] = set()

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def _delta(self, delta: Delta) -> bytes:
        body: Json = {}
        if delta.content:
            body["content"] = delta.content
        if delta.reasoning:
            body |= _told_reasoning(delta.reasoning)
        if delta.tools:
            body["tool_calls"] = [_told_piece(piece) for piece in delta.tools]
        return self._begin(delta.index) + self._chunk(delta.index, body, entries=delta.entries)

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""})

    def finish(self, reply: Reply) -> bytes:
        events = []
        for choice in reply.choices:
            events.append(self._begin(choice.index))
            events.append(self._chunk(choice.index, {}, finish=_finish(choice)))
        if self._call.include_usage:
            last = {**self._head, "choices": [], "usage": _usage(reply), "system_fingerprint": reply.fingerprint}
            events.append(_event(last))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def error(self, error: ProxyError) -> bytes:
        return _event(OpenAIChat().error(error))

    def keepalive(self, beat: int) -> bytes:
        if beat % EMPTY_CHUNK_EACH == EMPTY_CHUNK_EACH - 1:
            return self._begin(0) + self._chunk(0, {})
        return b": keep-alive\n\n"

    def _chunk(self, index: int, delta: Json, *, entries: Sequence[Entry] = (), finish: str | None = None) -> bytes:
        logprobs = _logprobs(entries) if self._call.logprobs and entries else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._call.include_usage else {}
        return _event({**self._head, "choices": [choice], **usage})


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _id(told: Told) -> str:
    return f"chatcmpl-{told.completion_id}"


def _told_message(message: Json) -> Json:
    found = {"role": "assistant", "content": message["content"], "refusal": None}
    if message.get("reasoning"):
        found |= _told_reasoning(message["reasoning"])
    if message.get("tool_calls"):
        found["tool_calls"] = message["tool_calls"]
    return found


def _told_reasoning(text: str) -> Json:
    # clients read one name or the other; none was seen to read both
    return {"reasoning": text, "reasoning_content": text}


def _told_piece(piece: ToolDelta) -> Json:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _logprobs(entries: Sequence[Entry]) -> Json:
    content = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "bytes": entry.bytes,
            "top_logprobs": [
                {"token": one.token, "logprob": one.logprob, "bytes": one.bytes} for one in entry.top_logprobs or ()
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _finish(choice: ReplyChoice) -> str:
    # `repetition` and the like are the engine's own; to a client the turn has stopped
    return FINISHES.get(choice.finish or "stop", "stop")


def _usage(reply: Reply) -> Json:
    told: Json = {name: reply.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    if "cached_tokens" in reply.usage:
        told["prompt_tokens_details"] = {"cached_tokens": reply.usage["cached_tokens"]}
    if "reasoning_tokens" in reply.usage:
        told["completion_tokens_details"] = {"reasoning_tokens": reply.usage["reasoning_tokens"]}
    return told


# requests -----------------------------------------------------------------------------------------------------------


def _wrong(error: msgspec.ValidationError) -> BadRequest:
    message, _, path = str(error).partition(" - at `")
    param = path.rstrip("`").removeprefix("$").lstrip(".") or None
    if "missing required field" in message:
        missing = message.split("`")[1]
        param = f"{param}.{missing}" if param else missing
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return BadRequest(f"Invalid type for '{param}': {message}.", param=param, code="invalid_type")


def _asked(read: _Body, limits: Limits) -> Sampling:
    n = 1 if read.n is None else read.n
    if not 1 <= n <= limits.max_choices:
        raise BadRequest(f"`n` lies between 1 and {limits.max_choices} here.", param="n")
    max_tokens = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest("`max_completion_tokens` is at least 1.", param="max_completion_tokens")
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ):
        value = getattr(read, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"`{name}` lies between {low:g} and {high:g}.", param=name)
    stop = [read.stop] if isinstance(read.stop, str) else read.stop or []
    if len(stop) > MAX_STOPS or any(not one for one in stop):
        raise BadRequest(f"`stop` holds at most {MAX_STOPS} strings, none of them empty.", param="stop")
    return Sampling(
        temperature=read.temperature,
        top_p=read.top_p,
        top_k=read.top_k,
        min_p=read.min_p,
        repetition_penalty=read.repetition_penalty,
        presence_penalty=read.presence_penalty,
        frequency_penalty=read.frequency_penalty,
        max_tokens=max_tokens,
        seed=read.seed,
        stop=stop,
        n=n,
    )


def _extras(raw: Json, read: _Body, tools: list[Json] | None) -> tuple[Json, list[str]]:
    """What goes to the engine as it is, and what it does to the tokens."""
    extras = {name: raw[name] for name in PASSED_ON if raw.get(name) is not None}
    marks = [mark for name, mark in PASSED_ON.items() if mark is not None and raw.get(name)]
    kind = None if read.response_format is None else read.response_format.get("type")
    if read.response_format is not None:
        if kind not in ("text", "json_object", "json_schema"):
            raise BadRequest(
                "`response_format.type` is one of text, json_object, json_schema.", param="response_format.type"
            )
        if kind != "text":
            extras["response_format"] = read.response_format
            marks.append("grammar")
    choice = read.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in [tool["function"]["name"] for tool in tools or ()]:
            raise BadRequest("`tool_choice` names none of the `tools`.", param="tool_choice")
        extras["tool_choice"] = {"type": "function", "function": {"name": name}}
        marks.append("forced_tool")
    elif choice not in (None, "none", "auto", "required"):
        raise BadRequest("`tool_choice` is none, auto, required or a function.", param="tool_choice")
    elif choice == "required" and not tools:
        raise BadRequest("`tool_choice` goes with `tools` only.", param="tool_choice")
    elif choice is not None and tools:
        extras["tool_choice"] = choice
        marks += ["forced_tool"] if choice == "required" else []
    if not tools:
        # an engine refuses a request that says how to call no tools
        extras.pop("parallel_tool_calls", None)
    return extras, list(dict.fromkeys(marks))


def _tools(tools: list[Json] | None) -> list[Json] | None:
    found = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function":
            raise BadRequest("Only tools of type `function` are supported.", param=f"tools[{i}].type")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("A tool has a `function` with a `name`.", param=f"tools[{i}].function")
        found.append({"type": "function", "function": _bare(function)})
    return found or None


def _message(message: Json, i: int) -> Json:
    """One message, normalized."""
    where = f"messages[{i}]"
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"`{where}.role` is one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    found: Json = {"role": "system" if role == "developer" else role}
    content = _content(message.get("content"), where)
    if content is not None:
        found["content"] = content
    elif role != "assistant":
        raise BadRequest(f"`{where}.content` is required.", param=f"{where}.content")
    else:
        found["content"] = None
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if isinstance(reasoning, str):
            found["reasoning"] = reasoning
        calls = message.get("tool_calls")
        if calls:
            found["tool_calls"] = _calls(calls, where)
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise BadRequest(f"`{where}.tool_call_id` is required.", param=f"{where}.tool_call_id")
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _content(content: Any, where: str) -> str | list[Json] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{where}.content` is text or a list of parts.", param=f"{where}.content")
    parts = []
    for j, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRequest("A content part is an object with a `type`.", param=f"{where}.content[{j}]")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise BadRequest("A text part has a `text`.", param=f"{where}.content[{j}].text")
        # cache marks move from message to message each turn and say nothing to the model
        parts.append({key: value for key, value in _bare(part).items() if key != "cache_control"})
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _calls(calls: Any, where: str) -> list[Json]:
    found = []
    for j, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(call.get("id"), str)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise BadRequest(
                "A tool call has an `id` and a `function` with `name` and `arguments`.",
                param=f"{where}.tool_calls[{j}]",
            )
        bare = {"name": function["name"], "arguments": function["arguments"]}
        found.append({"id": call["id"], "type": "function", "function": bare})
    return found


def _bare(value: Json) -> Json:
    return {key: item for key, item in value.items() if item is not None}
