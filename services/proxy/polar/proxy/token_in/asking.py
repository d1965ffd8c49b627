"""What token-in asks of an engine: ids of a conversation, text of ids, tokens in and out, a message of ids.

vLLM's own routes, which it has with --enable-scale-out; shapes as observed on 0.32. One object per call. It decides
nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from polar.schemas import TokenIds

from ..answer import Answer
from ..calls import Json
from ..engine import Endpoint
from ..errors import EngineBroken

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
GENERATE = "/inference/v1/generate"
ASIDE = {"messages": [{"role": "user", "content": "."}]}
"""In the place of a conversation, where only what else a request says counts."""

T = TypeVar("T")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


class _Sampled(msgspec.Struct):
    """One choice of what `GENERATE` answers."""

    index: int = 0
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    weight_versions: Any = None
    text: str = ""


class _Generated(msgspec.Struct):
    choices: list[_Sampled]
    prompt_token_ids: list[int] | None = None
    usage: Any = None


class _Told(msgspec.Struct):
    index: int
    message: Json


class _Derendered(msgspec.Struct):
    choices: list[_Told]


class Rendered(NamedTuple):
    """A prompt as the engine makes it, and the request that it would generate from."""

    ids: TokenIds
    request: Json


class Asking:
    """Asks `endpoint` for one call. `timeout`: of generating; `probe_timeout`: of everything else. Seconds."""

    def __init__(self, endpoint: Endpoint, request_id: str, *, timeout: float, probe_timeout: float) -> None:
        self._endpoint = endpoint
        self._request_id = request_id
        self._timeout = timeout
        self._probe_timeout = min(probe_timeout, timeout)

    async def _post(self, path: str, body: Json, aside: str = "") -> bytes:
        # what is asked besides must not be taken for the call itself
        request_id = f"{self._request_id}{aside}"
        return await self._endpoint.post(path, body, request_id=request_id, timeout=self._probe_timeout)

    async def render(self, body: Json, *, aside: str = "") -> Rendered:
        """The prompt that the chat request `body` makes.

        Raises:
            PromptTooLong, EngineRefused: as the chat request itself would be.
        """
        data = await self._post(RENDER, body, aside)
        try:
            request = msgspec.json.decode(data, type=Json)
            return Rendered(TokenIds(request["token_ids"]), request)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError):
            raise EngineBroken("the engine's rendering is no request with token ids") from None

    async def text(self, ids: TokenIds) -> str:
        """What `ids` say, control tokens written out."""
        if not len(ids):
            return ""
        model = await self._model()
        data = await self._post("/detokenize", {"model": model, "tokens": ids.array.tolist()}, "-text")
        return _decoded(data, _Text).prompt

    async def encode(self, text: str) -> list[int]:
        body = {"model": await self._model(), "prompt": text, "add_special_tokens": False}
        return _decoded(await self._post("/tokenize", body, "-ids"), _Tokens).tokens

    async def _model(self) -> str:
        return (await self._endpoint.identity()).model

    async def generate(self, request: Json, ids: TokenIds, chat: Json, answer: Answer) -> None:
        """Sample after exactly `ids` and feed the reply to `answer`, as the chat route would tell it.

        Args:
            request: what the engine rendered of the whole conversation: its sampling, salt and the like.
            chat: the chat request, for its tools and whatever else says how a reply is parsed.

        Raises:
            EngineError: it refuses or fails; or says that it sampled after another prompt.
        """
        prompt = ids.array.tolist()
        # text: the entries of a chat answer, and what a stop string leaves of the reply
        body = {**request, "token_ids": prompt, "return_token_ids": True, "output_mode": "text", "stream": False}
        data = await self._endpoint.post(GENERATE, body, request_id=self._request_id, timeout=self._timeout)
        told = _decoded(data, _Generated)
        if told.prompt_token_ids is not None and told.prompt_token_ids != prompt:
            raise EngineBroken("the engine sampled after another prompt than it was given")
        messages = await self._messages(told, prompt, chat)
        if not chat.get("top_logprobs"):
            for choice in told.choices:
                _without_others(choice.logprobs)
        choices = [_choice(choice, messages[choice.index]) for choice in told.choices]
        answer.feed(msgspec.json.encode({"choices": choices, "prompt_token_ids": prompt, "usage": told.usage}))

    async def _messages(self, told: _Generated, prompt: list[int], chat: Json) -> dict[int, Json]:
        """The replies as messages, by index, as the engine's own parsers read them."""
        found = await self._derendered({one.index: _said(one) for one in told.choices}, prompt, chat)
        again: dict[int, list[int]] = {}
        for one in told.choices:
            message = found.setdefault(one.index, {"role": "assistant", "content": ""})
            if not message.get("tool_calls") and not message.get("reasoning"):
                # the route shows control tokens, and what a stop string has cut off; a chat's reply shows neither
                message["content"] = one.text
            elif isinstance(one.stop_reason, str):
                again[one.index] = await self.encode(one.text)
        return found | await self._derendered(again, prompt, chat)

    async def _derendered(self, replies: dict[int, list[int]], prompt: list[int], chat: Json) -> dict[int, Json]:
        choices = [
            {"index": index, "finish_reason": "stop", "stop_reason": None, "token_ids": ids}
            for index, ids in replies.items()
            if ids  # none is refused
        ]
        if not choices:
            return {}
        response = {"request_id": self._request_id, "prompt_token_ids": prompt, "choices": choices}
        body = {"model": chat["model"], "generate_response": response, "chat_request": {**chat, **ASIDE}}
        told = _decoded(await self._post(DERENDER, body, "-message"), _Derendered)
        return {one.index: one.message for one in told.choices}


def _said(choice: _Sampled) -> list[int]:
    """Its ids without its end of turn, which the route would show as text."""
    ended = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    return choice.token_ids[:-1] if ended else choice.token_ids


def _choice(choice: _Sampled, message: Json) -> Json:
    finish = choice.finish_reason
    if message.get("tool_calls") and finish is not None and finish not in ("abort", "error"):
        finish = "tool_calls"  # the chat route's word for it
    return {
        "index": choice.index,
        "message": message,
        "logprobs": choice.logprobs,
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "weight_versions": choice.weight_versions,
    }


def _without_others(logprobs: Any) -> None:
    """The chat route tells no other tokens where none are asked for; this one tells the sampled one again."""
    for entry in (logprobs.get("content") if isinstance(logprobs, dict) else None) or ():
        entry["top_logprobs"] = []


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        where = str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
        raise EngineBroken(f"the engine's answer to a token-in question is not one: {where}") from None
