"""A request of Chat Completions as a `Call`. Pure."""

from __future__ import annotations

import msgspec

from polar.schemas import Sampling

from ...calls import Call, Json
from ...errors import BadRequest
from ..base import Limits, json_object
from ..fields import Action, names
from .content import Reading, conversation
from .fields import FIELDS
from .tools import chosen, offered

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
REFUSED = {one.path: one.note for one in FIELDS if one.path.isidentifier() and one.action is Action.REFUSED}
BY_SETTING = names(FIELDS, Action.SETTING)
KNOWN = names(FIELDS, *Action)
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
    modalities: list[str] | None = None


def read(body: bytes, limits: Limits, *, dialect: str) -> Call:
    """The call that a body asks for.

    Raises:
        BadRequest: naming the field.
    """
    raw = json_object(body)
    try:
        return _read(raw, limits, dialect)
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None


def _read(raw: Json, limits: Limits, dialect: str) -> Call:
    for name, why in REFUSED.items():
        if raw.get(name) is not None:
            raise BadRequest(f"`{name}` is not supported: {why}.", param=name, code="unsupported_parameter")
    dropped = [name for name in sorted(BY_SETTING) if raw.get(name)]
    if dropped and limits.provider_tools == "refuse":
        raise BadRequest(
            f"`{dropped[0]}` asks for a tool of the provider's, which is not available here.",
            param=dropped[0],
            code="unsupported_parameter",
        )
    try:
        read = msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        raise _wrong(error) from None
    if any(one != "text" for one in read.modalities or ()):
        raise BadRequest("`modalities` is text here.", param="modalities", code="unsupported_parameter")
    tools = offered(read.tools)
    choice = chosen(read.tool_choice, tools)
    extras, marks = _extras(raw, read)
    if not choice.functions:
        # an engine refuses a request that says how to call no tools
        extras.pop("parallel_tool_calls", None)
    asked = _asked(read, limits)
    top = read.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"`top_logprobs` lies between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")
    if top and not read.logprobs:
        raise BadRequest("`top_logprobs` goes with `logprobs` only.", param="top_logprobs")
    if not read.messages:
        raise BadRequest("`messages` is empty.", param="messages")
    reading = Reading(limits)
    return Call(
        dialect=dialect,
        model=read.model,
        messages=conversation(read.messages, reading),
        tools=choice.functions or None,
        extras=extras | choice.extras,
        asked=asked,
        n=asked.n or 1,
        stream=bool(read.stream),
        include_usage=bool(read.stream_options is not None and read.stream_options.include_usage),
        logprobs=bool(read.logprobs),
        top_logprobs=top,
        constraints=tuple(dict.fromkeys((*marks, *choice.marks))),
        unknown=len(raw.keys() - KNOWN),
        media=tuple(reading.media),
        dropped=tuple(dropped),
    )


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


def _extras(raw: Json, read: _Body) -> tuple[Json, list[str]]:
    """What goes to the engine as it is, and what it does to the tokens."""
    extras = {name: raw[name] for name in PASSED_ON if raw.get(name) is not None}
    marks = [mark for name, mark in PASSED_ON.items() if mark is not None and raw.get(name)]
    if read.response_format is not None:
        kind = read.response_format.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise BadRequest(
                "`response_format.type` is one of text, json_object, json_schema.", param="response_format.type"
            )
        if kind != "text":
            extras["response_format"] = read.response_format
            marks.append("grammar")
    return extras, marks
