"""A request of generateContent as a `Call`. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from polar.schemas import Sampling

from ...calls import Call, Json
from ...errors import BadRequest
from ..base import Limits, json_object
from ..fields import Action
from .checks import fields, of_validation, one_of, text, wrong
from .content import Reading, conversation
from .fields import FIELDS
from .schema import json_schema
from .tools import chosen, offered

CONFIG = "generationConfig"
KNOWN = frozenset(one.path for one in FIELDS)
REFUSED = {one.path: one.note for one in FIELDS if one.action is Action.REFUSED}
MIME_TYPES = ("text/plain", "application/json", "text/x.enum")
LEVELS = {"MINIMAL": "low", "LOW": "low", "MEDIUM": "medium", "HIGH": "high", "XHIGH": "high"}
"""The words that every engine knows."""
UNSPECIFIED = "THINKING_LEVEL_UNSPECIFIED"
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
RANGES = {
    "temperature": (0.0, 2.0),
    "topP": (0.0, 1.0),
    "presencePenalty": (-2.0, 2.0),
    "frequencyPenalty": (-2.0, 2.0),
}


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool = False
    thinking_budget: int | None = None
    thinking_level: str | None = None


class _Config(msgspec.Struct, rename="camel"):
    """The fields of `generationConfig` that are read."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    stop_sequences: list[str] = []
    candidate_count: int = 1
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool = False
    logprobs: int = 0
    response_mime_type: str = "text/plain"
    response_schema: Json | None = None
    response_json_schema: Any = None
    response_modalities: list[str] = []
    thinking_config: _Thinking = msgspec.field(default_factory=_Thinking)


def read(body: bytes, limits: Limits, *, dialect: str, model: str, stream: bool) -> Call:
    """The call that a body asks of `model`, both named by the path.

    Raises:
        BadRequest: naming the field.
    """
    raw = json_object(body)
    try:
        return _read(raw, limits, dialect, model, stream)
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None


def read_count(body: bytes, limits: Limits, *, dialect: str, model: str) -> Call:
    """The call whose prompt countTokens is to count: `contents`, or a whole `generateContentRequest`."""
    raw = json_object(body)
    try:
        given = fields(raw, "body")
        whole = given.get("generateContentRequest")
        if whole is not None and given.get("contents"):
            raise wrong("contents", "only one of contents and generateContentRequest can be set.")
        return _read(raw if whole is None else whole, limits, dialect, model, stream=False)
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None


def _read(raw: Json, limits: Limits, dialect: str, model: str, stream: bool) -> Call:
    given = fields(raw, "body")
    config = fields(given.get(CONFIG, {}), CONFIG)
    unknown = _looked_at(given, "") + _looked_at(config, f"{CONFIG}.")
    asked = _config(config)
    reading = Reading(limits)
    messages = conversation(given.get("systemInstruction"), given.get("contents"), reading)
    if not any(message["role"] != "system" for message in messages):
        raise wrong("contents", "contents are required.")
    tools = offered(given.get("tools"), limits)
    choice = chosen(given.get("toolConfig"), tools)
    form, marks = _format(asked, config)
    return Call(
        dialect=dialect,
        model=model,
        messages=messages,
        tools=choice.functions,
        extras=choice.extras | _prefill(messages) | _template(asked.thinking_config, limits) | form,
        asked=_sampling(asked, limits),
        n=asked.candidate_count,
        stream=stream,
        include_usage=True,
        logprobs=asked.response_logprobs,
        top_logprobs=asked.logprobs if asked.response_logprobs else 0,
        constraints=(*choice.marks, *marks),
        unknown=unknown,
        media=tuple(reading.media),
        dropped=(*tools.dropped, *reading.dropped),
        # as the provider: thoughts are shown to who asks for them
        hide_thinking=not asked.thinking_config.include_thoughts,
    )


def _looked_at(given: Json, prefix: str) -> int:
    """Refuses what is refused; returns how many fields nobody here knows."""
    for name, value in given.items():
        if value and (why := REFUSED.get(prefix + name)) is not None:
            raise wrong(prefix + name, f"not supported here: {why}")
    return sum(prefix + name not in KNOWN for name in given)


def _config(config: Json) -> _Config:
    given = dict(config)
    if "thinkingConfig" in given:
        given["thinkingConfig"] = _plain(fields(given["thinkingConfig"], f"{CONFIG}.thinkingConfig"))
    try:
        return msgspec.convert(_plain(given), _Config)
    except msgspec.ValidationError as error:
        raise of_validation(error, CONFIG) from None


def _plain(given: Json) -> Json:
    """With integers that are written as 40.0 as such."""

    def one(value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**31 else value

    return {name: one(value) for name, value in given.items()}


def _sampling(asked: _Config, limits: Limits) -> Sampling:
    def at(name: str) -> str:
        return f"{CONFIG}.{name}"

    for name, (low, high) in RANGES.items():
        value = getattr(asked, next(one.name for one in msgspec.structs.fields(_Config) if one.encode_name == name))
        if value is not None and not low <= value <= high:
            raise wrong(at(name), f"must be in the range [{low:g}, {high:g}].")
    if asked.max_output_tokens is not None and asked.max_output_tokens < 0:
        raise wrong(at("maxOutputTokens"), "must be positive.")
    if asked.top_k is not None and (asked.top_k < 0 or asked.top_k != int(asked.top_k)):
        raise wrong(at("topK"), "must be a positive integer.")
    if not 1 <= asked.candidate_count <= limits.max_choices:
        raise wrong(at("candidateCount"), f"must be in the range [1, {limits.max_choices}].")
    if len(asked.stop_sequences) > MAX_STOPS or any(not one for one in asked.stop_sequences):
        raise wrong(at("stopSequences"), f"holds at most {MAX_STOPS} strings, none of them empty.")
    if not 0 <= asked.logprobs <= MAX_TOP_LOGPROBS:
        raise wrong(at("logprobs"), f"must be in the range [0, {MAX_TOP_LOGPROBS}].")
    if asked.logprobs and not asked.response_logprobs:
        raise wrong(at("logprobs"), "is only to be set when responseLogprobs is true.")
    if any(one not in ("TEXT", "MODALITY_UNSPECIFIED") for one in asked.response_modalities):
        raise wrong(at("responseModalities"), "this model answers with TEXT only.")
    return Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=int(asked.top_k) if asked.top_k else None,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        # 0 is the default of a number that was not set
        max_tokens=asked.max_output_tokens or None,
        seed=asked.seed,
        stop=asked.stop_sequences,
        n=asked.candidate_count,
    )


def _prefill(messages: list[Json]) -> Json:
    """A conversation that ends with the model's words is gone on with, not answered."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    content = last["content"]
    if last.get("tool_calls") or not isinstance(content, str) or not content.strip():
        raise wrong("contents", "Please ensure that multiturn requests end with a user role or a function response.")
    if content != content.rstrip():
        raise wrong("contents", "the model's last words cannot end with white space.")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _template(thinking: _Thinking, limits: Limits) -> Json:
    """Whether and how hard the model thinks, as chat templates are told it."""
    extras: Json = {}
    where = f"{CONFIG}.thinkingConfig"
    level, budget = thinking.thinking_level, thinking.thinking_budget
    effort = None
    if level not in (None, UNSPECIFIED):
        effort = LEVELS[one_of(level.upper() if level else level, tuple(LEVELS), f"{where}.thinkingLevel")]
    if budget is not None and budget < -1:
        raise wrong(f"{where}.thinkingBudget", "must be -1 or more.")
    if limits.thinking_switch == "template":
        return extras
    if budget is not None or effort is not None:
        # templates know the one name or the other, and ignore what they do not know
        on = budget != 0
        extras["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
    if effort is not None:
        extras["reasoning_effort"] = effort
    return extras


def _format(asked: _Config, config: Json) -> tuple[Json, list[str]]:
    """The engine's fields for the form of the reply, and what they do to its tokens."""
    mime = one_of(asked.response_mime_type, MIME_TYPES, f"{CONFIG}.responseMimeType")
    where, schema = f"{CONFIG}.responseSchema", None
    if asked.response_json_schema is not None:
        where = f"{CONFIG}.responseJsonSchema"
        if asked.response_schema is not None:
            raise wrong(where, "only one of responseSchema and responseJsonSchema can be set.")
        if not isinstance(config.get("responseJsonSchema"), dict):
            raise wrong(where, "an object is expected")
        schema = config["responseJsonSchema"]
    elif asked.response_schema is not None:
        schema = json_schema(config["responseSchema"], where)
    if mime == "text/plain":
        if schema is not None:
            raise wrong(where, "is only to be set with responseMimeType application/json or text/x.enum.")
        return {}, []
    if mime == "application/json":
        form: Json = {"type": "json_object"}
        if schema is not None:
            form = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        return {"response_format": form}, ["grammar"]
    words = None if schema is None else schema.get("enum")
    if not isinstance(words, list) or not words:
        raise wrong(where, "text/x.enum needs a schema with an enum.")
    return {"structured_outputs": {"choice": [text(word, f"{where}.enum") for word in words]}}, ["grammar"]
