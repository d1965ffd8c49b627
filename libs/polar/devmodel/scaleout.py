"""vLLM's routes of tokens in and out, which it has with --enable-scale-out: render, generate, derender.

Field for field as observed on 0.32, in what a client of ours reads or sends; without the flag they answer 403 as vLLM
does. A prompt that was rendered is remembered by its request's id, so that a script, which answers conversations, knows
the conversation that a generate call with the same id continues. Ranks are counted among the listed log-probabilities.
"""

import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from .chat import ChatTokenizer
from .choice import Choice
from .engine import Backend, Call, Generation
from .errors import ApiError, invalid
from .parse import read_calls, split_reasoning
from .request import ChatRequest, Fields, Sampling, read_chat, read_sampling
from .wire import usage

Json = dict[str, Any]
REMEMBERED = 1_000
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
NEEDS_REQUEST = (
    "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak "
    "raw parser markup into content."
)
NOT_SENT = "prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"


class Server(Protocol):
    """What the routes use of the server that they are part of."""

    backend: Backend

    def check_model(self, model: object) -> None: ...

    def call(
        self, identity: str, prompt: list[int], sampling: Sampling, http: web.Request, request: ChatRequest | None
    ) -> Call: ...

    async def run(self, call: Call, http: web.Request) -> web.StreamResponse: ...

    def now(self) -> int: ...


class ScaleOut:
    """The routes of one server. `body_of` reads a request's JSON, `answer` makes an answer of it."""

    def __init__(
        self,
        server: Server,
        *,
        enabled: bool,
        body_of: Callable[[web.Request], Awaitable[Any]],
        answer: Callable[[Json], web.Response],
    ) -> None:
        self._server = server
        self._enabled = enabled
        self._body_of = body_of
        self._answer = answer
        self._rendered: OrderedDict[str, ChatRequest] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        handlers = {
            "/v1/chat/completions/render": self._render,
            "/inference/v1/generate": self._generate,
            "/v1/chat/completions/derender": self._derender,
        }
        return [web.post(path, handler if self._enabled else _disabled) for path, handler in handlers.items()]

    async def _render(self, http: web.Request) -> web.Response:
        request = read_chat(await self._body_of(http))
        server = self._server
        server.check_model(request.model)
        prompt = server.backend.chat.render(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs,
        )
        identity = str(http.headers.get("X-Request-Id") or request.body.get("request_id") or uuid.uuid4().hex[:16])
        call = server.call(identity, prompt, request.sampling, http, request)
        self._rendered[identity] = request
        self._rendered.move_to_end(identity)
        while len(self._rendered) > REMEMBERED:
            self._rendered.popitem(last=False)
        return self._answer(generate_request(call, request))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        fields = Fields(await self._body_of(http))
        self._server.check_model(fields.body.get("model"))
        for name in ("token_ids", "sampling_params"):
            if name not in fields.body:
                fields.missing(name)
        prompt = fields.integers("token_ids")
        fields.check()
        if not prompt:
            message = "List should have at least 1 item after validation, not 0"
            raise invalid(("too_short", "body.token_ids", message, []))
        if unknown := [token for token in prompt if not 0 <= token < self._server.backend.chat.vocabulary]:
            raise ApiError(f"Token id {unknown[0]} is out of vocabulary")
        limit = self._server.backend.max_model_len
        if len(prompt) > limit:
            raise ApiError(
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {limit}. "
                "Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
        given = dict(fields.mapping("sampling_params"))
        asked = given.pop("logprobs", None)
        given["logprobs"], given["top_logprobs"] = asked is not None, asked or 0
        if isinstance(given.get("max_tokens"), int):
            given["max_tokens"] = min(given["max_tokens"], limit)  # this route refuses none
        reads = Fields(given)
        number = reads.integer("n")
        n = 1 if number is None else number
        sampling = read_sampling(reads, n)
        if fields.flag("stream"):
            raise ApiError("stream is not supported here", param="stream")
        identity = str(http.headers.get("X-Request-Id") or fields.body.get("request_id") or uuid.uuid4().hex[:16])
        call = self._server.call(identity, prompt, sampling, http, None)
        known = self._rendered.get(identity)
        text = fields.body.get("output_mode") == "text"
        call.tokens = TokensIn(n, text, fields.flag("return_token_ids"), {} if known is None else dict(known.body))
        return await self._server.run(call, http)

    async def _derender(self, http: web.Request) -> web.Response:
        fields = Fields(await self._body_of(http))
        server = self._server
        server.check_model(fields.body.get("model"))
        if "generate_response" not in fields.body:
            raise invalid(
                ("missing", "body.DerenderChatRequest.generate_response", "Field required", fields.body),
                ("missing", "body.DerenderChatStreamRequest.stream", "Field required", fields.body),
                ("missing", "body.DerenderChatStreamRequest.generate_chunk", "Field required", fields.body),
            )
        response = Fields(fields.mapping("generate_response"), "body.generate_response")
        choices = [Fields(choice, "body.generate_response.choices") for choice in response.items("choices")]
        asked = fields.body.get("chat_request")
        fields.check()
        if asked is None:
            raise ApiError(NEEDS_REQUEST)
        request = read_chat(asked)
        told = [_message(choice, request, server.backend) for choice in choices]
        prompt = fields.integer("prompt_tokens") or 0
        sampled = sum(len(choice.integers("token_ids")) for choice in choices)
        empty = ("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params")
        body: Json = {
            "id": response.body.get("request_id"),
            "object": "chat.completion",
            "created": server.now(),
            "model": fields.body.get("model") or server.backend.model,
            "choices": told,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _counts(prompt, sampled),
            **dict.fromkeys((*empty, "metrics")),
        }
        return self._answer(body)


class TokensIn:
    """What a generate call asks for besides its tokens. `body`: the chat request that its prompt was rendered from."""

    def __init__(self, n: int, text: bool, return_prompt: bool, body: Json) -> None:
        self.n = n
        self.text = text
        self.return_prompt = return_prompt
        self.body = body


async def _disabled(http: web.Request) -> web.StreamResponse:
    raise ApiError(DISABLED, status=403, type="PermissionDeniedError")


def generate_request(call: Call, request: ChatRequest) -> Json:
    """The generate request that a chat request comes to."""
    sampling, given = call.sampling, request.body
    params: Json = {} if request.n == 1 else {"n": request.n}
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"):
        params[name] = getattr(sampling, name)
    if sampling.temperature > 0:
        params["top_p"] = sampling.top_p
        params |= {} if given.get("top_k") is None else {"top_k": given["top_k"]}
        params["min_p"] = sampling.min_p
    params |= {} if sampling.seed is None else {"seed": sampling.seed}
    params |= {"stop": list(sampling.stop), "stop_token_ids": sorted(sampling.stop_token_ids)}
    params["max_tokens"] = call.max_tokens
    params |= {"min_tokens": sampling.min_tokens} if sampling.min_tokens else {}
    params |= {} if sampling.top_logprobs is None else {"logprobs": sampling.top_logprobs}
    params |= {"skip_special_tokens": False} if request.parses_tools else {}
    params |= {"output_kind": 2, "skip_clone": True}
    if held := max((len(stop) - 1 for stop in sampling.stop), default=0):
        params["output_text_buffer_length"] = held
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    params |= {"bad_words": [], "skip_reading_prefix_cache": False}
    return {
        "request_id": f"chatcmpl-{call.id}",
        "token_ids": call.prompt_ids,
        **dict.fromkeys(("token_offsets", "features", "content_parts")),
        "sampling_params": params,
        "model": request.model,
        **dict.fromkeys(("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids")),
        "output_mode": "tokens",
        "stream": request.stream,
        "stream_options": given.get("stream_options"),
        "cache_salt": given.get("cache_salt"),
        "priority": given.get("priority") or 0,
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params")),
    }


def generated(generation: Generation, model: str, created: int) -> Json:
    """The answer of the generate route."""
    call, choices = generation.call, generation.choices
    asked: TokensIn = call.tokens
    return {
        "request_id": f"generate-tokens-{call.id}",
        "model": model,
        "created": created,
        "usage": _counts(len(call.prompt_ids), sum(len(choice.ids) for choice in choices)),
        "prompt_logprobs": None,
        "prompt_token_ids": call.prompt_ids if asked.return_prompt else None,
        **dict.fromkeys(NOT_SENT),
        "output_mode": "text" if asked.text else "tokens",
        "choices": [_generated(choice, call, asked) for choice in choices],
    }


def _generated(choice: Choice, call: Call, asked: TokensIn) -> Json:
    entries = None
    if call.sampling.top_logprobs is not None:
        entries = _entries(choice) if asked.text else _numbers(choice)
    return {
        "index": choice.index,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": choice.spans,
        **({"text": choice.text} if asked.text else {}),
        "logprobs": None if entries is None else {"content": entries},
    }


def _entries(choice: Choice) -> list[Json]:
    """As chat tells them, and the sampled token again where no others are asked for."""
    alone = [{name: entry[name] for name in ("token", "logprob", "bytes")} for entry in choice.entries]
    return [
        entry | {"top_logprobs": entry["top_logprobs"] or [one]}
        for entry, one in zip(choice.entries, alone, strict=True)
    ]


def _numbers(choice: Choice) -> list[Json]:
    found = []
    for token, entry, top in zip(choice.ids, choice.entries, choice.tops, strict=True):
        values = [value for _, value in top]
        others = [{"token_id": one, "logprob": value, "rank": _rank(value, values)} for one, value in top]
        rank = _rank(entry["logprob"], values)
        found.append({"token_id": token, "logprob": entry["logprob"], "rank": rank, "top_logprobs": others})
    return found


def _rank(value: float, among: list[float]) -> int:
    return 1 + sum(other > value for other in among)


def _message(choice: Fields, request: ChatRequest, backend: Backend) -> Json:
    """One choice of a derendered answer. Control tokens stay in the text: the parsers are to see them."""
    ids = choice.integers("token_ids")
    choice.check()
    index = choice.body.get("index", 0)
    if not ids:
        raise ApiError(f"choice {index} has empty or null token_ids")
    text = backend.chat.decode(ids)
    reasoning, text = split_reasoning(text) if backend.reasoning else (None, text)
    content, calls = read_calls(text) if request.parses_tools else (text, [])
    message: Json = {"role": "assistant", "content": content}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    message |= {"tool_calls": calls} if calls else {}
    logprobs = choice.mapping("logprobs").get("content")
    return {
        "index": index,
        "message": message | {"reasoning": reasoning},
        "logprobs": None if logprobs is None else {"content": _named(logprobs, backend.chat)},
        "finish_reason": choice.body.get("finish_reason"),
        "stop_reason": choice.body.get("stop_reason"),
        "token_ids": ids if request.return_token_ids else None,
        "routed_experts": None,
    }


def _named(entries: list[Json], chat: ChatTokenizer) -> list[Json]:
    names = chat.stream(skip_special=False)

    def named(entry: Json) -> Json:
        text = names.peek(entry["token_id"])
        return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}

    found = []
    for entry in entries:
        found.append(named(entry) | {"top_logprobs": [named(one) for one in entry.get("top_logprobs") or ()]})
        names.step(entry["token_id"])
    return found


def _counts(prompt: int, sampled: int) -> Json:
    return usage(prompt, sampled) | {"prompt_tokens_details": None, "completion_tokens_details": None}
