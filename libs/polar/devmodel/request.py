"""Read a chat request as vLLM 0.32 does: the same defaults, the same refusals, the same messages.

Pure: takes the decoded JSON, gives a frozen `ChatRequest` or raises `ApiError`. It does not know any tokenizer or
model, so what needs them (lengths, vocabulary) is checked by the server. Unknown fields are ignored, as vLLM ignores
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError, bad_value, invalid

MAX_LOGPROBS = 20  # vLLM's --max-logprobs
Json = dict[str, Any]

# Fields that force or mask tokens by a grammar; a backend that has none refuses them by name.
CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "response_format",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one call: `top_k` 0 is off, `seed` None is free, `max_tokens` None is up to the model's end."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    top_logprobs: int | None = None
    """None: no log-probabilities asked; k: the sampled token's and those of the k likeliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call of `/v1/chat/completions` with every default filled in; `body` is what came."""

    body: Mapping[str, Any]
    model: str | None
    messages: list[Json]
    tools: list[Json]
    tool_choice: str | Json
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_weight_versions: bool
    tokens_as_ids: bool
    skip_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Json
    sampling: Sampling

    @property
    def parses_tools(self) -> bool:
        """Whether tool calls in the text become `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"


class Fields:
    """Typed reads of a JSON object; every mistake is kept, so that one answer names them all."""

    def __init__(self, body: object, path: str = "body") -> None:
        self._errors: list[tuple[str, str, str, object]] = []
        if not isinstance(body, dict):
            self._add(
                "model_attributes_type",
                path,
                "Input should be a valid dictionary or object to extract fields from",
                body,
            )
            self.check()
        self.body: Json = body if isinstance(body, dict) else {}
        self._path = path

    def _add(self, kind: str, loc: str, message: str, value: object) -> None:
        self._errors.append((kind, loc, message, value))

    def missing(self, name: str) -> None:
        """Note that a required field is absent."""
        self._add("missing", f"{self._path}.{name}", "Field required", self.body)

    def check(self) -> None:
        """Raise what was noted, if anything."""
        if self._errors:
            raise invalid(*self._errors)

    def number(self, name: str, default: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        try:
            return float(value)
        except (TypeError, ValueError):
            kind = "parsing" if isinstance(value, str) else "type"
            tail = ", unable to parse string as a number" if kind == "parsing" else ""
            self._add(f"float_{kind}", f"{self._path}.{name}", f"Input should be a valid number{tail}", value)
            return default

    def integer(self, name: str) -> int | None:
        value = self.body.get(name)
        return None if value is None else self._integer(value, f"{self._path}.{name}")

    def _integer(self, value: object, loc: str) -> int:
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                message = "Input should be a valid integer, unable to parse string as an integer"
                self._add("int_parsing", loc, message, value)
                return 0
        self._add("int_type", loc, "Input should be a valid integer", value)
        return 0

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        words = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, bool):
            return value
        known = words.get(str(value).lower())
        if known is None:
            message = "Input should be a valid boolean, unable to interpret input"
            self._add("bool_parsing", f"{self._path}.{name}", message, value)
            return default
        return known

    def items(self, name: str) -> list[Any]:
        """A list, empty when absent."""
        value = self.body.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self._add("list_type", f"{self._path}.{name}", "Input should be a valid list", value)
            return []
        return value

    def integers(self, name: str) -> list[int]:
        return [self._integer(value, f"{self._path}.{name}.{i}") for i, value in enumerate(self.items(name))]

    def mapping(self, name: str) -> Json:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._add("dict_type", f"{self._path}.{name}", "Input should be a valid dictionary", value)
            return {}
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or a list of them."""
        value = self.body.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        self._add("string_type", f"{self._path}.{name}", "Input should be a valid string", value)
        return ()


def read_messages(fields: Fields) -> list[Json]:
    """The conversation, each message an object."""
    if "messages" not in fields.body:
        fields.missing("messages")
    messages = fields.items("messages")
    fields.check()
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(("missing", f"body.messages.{i}.role", "Field required", message))
    if not messages:
        raise ApiError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return messages


def read_tools(fields: Fields) -> tuple[list[Json], str | Json]:
    """The tools in the order of fields in which vLLM renders them, and the tool choice."""
    tools: list[Json] = []
    for i, tool in enumerate(fields.items("tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(("missing", f"body.tools.{i}.function", "Field required", tool))
        head = {key: function.get(key) for key in ("name", "description", "parameters")}
        rest = {key: value for key, value in function.items() if key not in head}
        tools.append({"type": "function", "function": {**head, **rest}})
    fields.check()
    choice = fields.body.get("tool_choice")
    if fields.body.get("tools") == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise ApiError(f"{message} (parameter=tools)", param="tools")
    if choice is None:
        return tools, "auto" if tools else "none"
    if choice != "none" and not tools:
        raise ApiError("When using `tool_choice`, `tools` must be set. (parameter=tool_choice)", param="tool_choice")
    if isinstance(choice, dict):
        wanted = (choice.get("function") or {}).get("name")
        if wanted not in [tool["function"]["name"] for tool in tools]:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise ApiError(f"{message} (parameter=tool_choice)", param="tool_choice")
    elif choice not in ("none", "auto", "required"):
        message = (
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.'
        )
        raise ApiError(f"{message} (parameter=tool_choice)", param="tool_choice")
    return tools, choice


def read_sampling(fields: Fields, n: int = 1) -> Sampling:
    """The sampling parameters, range-checked in vLLM's order and words."""
    max_tokens = fields.integer("max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens")
    asked = fields.flag("logprobs")
    top = fields.integer("top_logprobs") or 0
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=max(-1, fields.integer("top_k") or 0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=_read_bias(fields.mapping("logit_bias")),
        seed=fields.integer("seed"),
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens") or 0,
        stop=fields.strings("stop"),
        stop_token_ids=frozenset(fields.integers("stop_token_ids")),
        ignore_eos=fields.flag("ignore_eos"),
        include_stop=fields.flag("include_stop_str_in_output"),
        top_logprobs=top if asked else None,
    )
    fields.check()
    if top and not asked:
        raise ApiError(
            "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)", param="top_logprobs"
        )
    if top < -1:
        raise bad_value("`top_logprobs` must be a positive value or -1.", "top_logprobs", top)
    if top > MAX_LOGPROBS or top < 0:
        message = f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise bad_value(message, "logprobs", top)
    _check_ranges(sampling, fields.integer("top_k") or 0, n)
    return sampling


def _read_bias(bias: Json) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError):
        wrong = [token for token in bias if not token.isdecimal()]
        message = "logit_bias contains key(s) that cannot be converted to integer token IDs:"
        raise bad_value(f"{message} {wrong}", "logit_bias", wrong) from None


def _check_ranges(s: Sampling, top_k: int, n: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= getattr(s, name) <= 2.0:
            raise ApiError(f"{name} must be in [-2, 2], got {getattr(s, name)}.")
    if s.repetition_penalty <= 0:
        raise ApiError(f"repetition_penalty must be greater than zero, got {s.repetition_penalty}.")
    if s.temperature < 0:
        raise bad_value(f"temperature must be non-negative, got {s.temperature}.", "temperature", s.temperature)
    if not 0 < s.top_p <= 1:
        raise bad_value(f"top_p must be in (0, 1], got {s.top_p}.", "top_p", s.top_p)
    if top_k < -1:
        raise ApiError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    if not 0 <= s.min_p <= 1:
        raise ApiError(f"min_p must be in [0, 1], got {s.min_p}.")
    if s.max_tokens is not None and s.max_tokens < 1:
        raise bad_value(f"max_tokens must be at least 1, got {s.max_tokens}.", "max_tokens", s.max_tokens)
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={s.max_tokens}, got {s.min_tokens}.")
    if any(not stop for stop in s.stop):
        raise ApiError("stop cannot contain an empty string.")
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > 1 and s.temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")


def read_chat(body: object) -> ChatRequest:
    """The request, or `ApiError` with vLLM's status, type and param."""
    fields = Fields(body)
    if "messages" not in fields.body:
        fields.missing("messages")
    stream = fields.flag("stream")
    n = fields.integer("n")
    n = 1 if n is None else n
    options = fields.mapping("stream_options")
    kwargs = fields.mapping("chat_template_kwargs")
    flags = {
        name: fields.flag(name, default)
        for name, default in (
            ("return_token_ids", False),
            ("return_weight_versions", False),
            ("skip_special_tokens", True),
            ("add_generation_prompt", True),
            ("continue_final_message", False),
        )
    }
    tokens_as_ids = fields.flag("return_tokens_as_token_ids")
    sampling = read_sampling(fields, n)
    if fields.body.get("stream_options") is not None and not stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", param="stream_options"
        )
    tools, choice = read_tools(fields)
    return ChatRequest(
        body=fields.body,
        model=fields.body.get("model"),
        messages=read_messages(fields),
        tools=tools,
        tool_choice=choice,
        n=n,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        tokens_as_ids=tokens_as_ids,
        template_kwargs=kwargs,
        sampling=sampling,
        **flags,
    )
