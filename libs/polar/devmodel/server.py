"""vLLM's HTTP surface over any backend: chat, tokens, models and the lifecycle routes.

Promises: every call is answered in vLLM's shapes; a client that leaves ends its generation at once; a paused server
holds new calls; closing the server ends every call and every task it started. It does not know how tokens come to be.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from types import TracebackType
from typing import Any

from aiohttp import web

from .engine import Backend, Call, Disconnect, Generation
from .errors import ApiError, bad_value, invalid
from .lifecycle import Lifecycle
from .request import ChatRequest, Fields, Sampling, read_chat, read_messages, read_tools
from .scaleout import ScaleOut, generated
from .wire import VERSION, Chunks, completion, dumps, sse

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY = 256 * 1024 * 1024
# aiohttp waits so long for handlers when it stops; they are cancelled before, so it never waits this out
SHUTDOWN = 0.5


class EngineServer:
    """A backend on a port. Use as an async context manager.

    `api_key`, where set, is asked for on `/v1`, as vLLM's. `refuse_when_paused` answers 503 during a pause (vLLM
    0.33) where the default lets calls hang (0.32). `scale_out` is vLLM's --enable-scale-out. `port` 0 picks a free one;
    `base_url` (ending in `/v1`) and `url` hold it once started.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        any_model: bool = False,
        refuse_when_paused: bool = False,
        scale_out: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend = backend
        self.owner = "vllm"
        """What /v1/models calls whoever serves them."""
        self.lifecycle = Lifecycle(refuse_when_paused=refuse_when_paused)
        self._address = (host, port)
        self._api_key = api_key
        self._any_model = any_model
        self._scale_out = scale_out
        self._clock = clock
        self._runner: web.AppRunner | None = None
        self._started = int(clock())
        self.url = ""

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self.url}/v1"

    async def __aenter__(self) -> "EngineServer":
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._close()

    async def _open(self) -> None:
        await self.backend.start()
        # a client that leaves cancels its handler, streamed or not: that is how its generation ends
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=SHUTDOWN, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, *self._address).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.backend.close()

    def _app(self) -> web.Application:
        @web.middleware  # it marks the function, which a bound method does not allow
        async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer_errors(request, handler)

        app = web.Application(client_max_size=MAX_BODY, middlewares=[answer_errors])
        app.add_routes([*self.routes(), *self.more_routes()])
        return app

    def routes(self) -> list[web.RouteDef]:
        """vLLM's."""
        return [
            web.post("/v1/chat/completions", self._chat),
            *ScaleOut(self, enabled=self._scale_out, body_of=_body, answer=_json).routes(),
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.get("/health", self._health),
            web.get("/ping", self._nothing),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/abort_requests", self._abort),
            web.get("/weight_info", self._weights),
            web.post("/update_weights", self._update_weights),
            web.post("/finish_weight_update", self._finish_weights),
            web.post("/update_weight_version", self._set_version),
        ]

    def more_routes(self) -> list[web.RouteDef]:
        """Routes that a subclass adds."""
        return []

    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guarded = self._api_key is not None and request.path.startswith("/v1")
        if guarded and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except ApiError as error:
            return _json(self.told_error(error), error.status, error.headers)
        except web.HTTPException as error:
            return _json({"detail": error.reason}, error.status)

    # chat -----------------------------------------------------------------------------------------------------------

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = read_chat(await _body(http))
        self.check_model(request.model)
        prompt = self.backend.chat.render(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs,
        )
        identity = http.headers.get("X-Request-Id") or request.body.get("request_id") or uuid.uuid4().hex[:16]
        call = self.call(str(identity), prompt, request.sampling, http, request)
        return await self.run(call, http)

    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._clock())

    def call(
        self, identity: str, prompt: list[int], sampling: Sampling, http: web.Request, request: ChatRequest | None
    ) -> Call:
        room = self.backend.max_model_len - len(prompt)
        if room < 1:
            # vLLM stops counting one past the end
            count = self.backend.max_model_len + 1
            message = (
                f"This model's maximum context length is {self.backend.max_model_len} tokens. However, your prompt "
                f"contains at least {count} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            raise bad_value(message, "input_tokens", count)
        asked = sampling.max_tokens
        if asked is not None and asked > self.backend.max_model_len:
            message = f"max_tokens={asked} cannot be greater than max_model_len={self.backend.max_model_len}."
            raise bad_value(f"{message} Please request fewer output tokens.", "max_tokens", asked)
        size = self.backend.chat.vocabulary
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            if unknown := sorted(number for number in ids if not 0 <= number < size):
                message = f"token_id(s) {unknown} in {name} contain out-of-vocab token ids. Vocabulary size: {size}"
                raise bad_value(message, name, unknown)
        limit = room if asked is None else min(asked, room)
        return Call(identity, prompt, sampling, max(limit, 1), request, dict(http.headers))

    async def run(self, call: Call, http: web.Request) -> web.StreamResponse:
        await self.lifecycle.admitted()
        generation = Generation(self.backend, call, self.lifecycle)
        outcome = "failed"
        aside = self.is_aside(call)
        try:
            with nullcontext() if aside else self.lifecycle.tracking(generation):
                await self.backend.prepare(call)
                stream = call.request is not None and call.request.stream
                answer = await (self._streamed(generation, http) if stream else self._whole(generation))
            outcome = "failed" if generation.failed else "finished"
            return answer
        except (asyncio.CancelledError, ConnectionError):
            outcome = "aborted"
            raise
        except Disconnect as cut:
            return _cut(http, cut)
        finally:
            if not aside:
                self.lifecycle.ended(outcome)
            self.on_end(call, generation, outcome)

    def is_aside(self, call: Call) -> bool:
        """Whether `call` is left out of the counts of calls."""
        return False

    def told_error(self, error: ApiError) -> Json:
        """The body of a refusal as this server tells it."""
        return error.body()

    def shaped(self, body: Json, generation: Generation) -> Json:
        """The body of a chat answer as this server tells it."""
        return body

    def on_end(self, call: Call, generation: Generation, outcome: str) -> None:
        """Called once when a call has ended: `finished`, `aborted` or `failed`."""

    async def _whole(self, generation: Generation) -> web.Response:
        call = generation.call
        async with generation:
            async for _ in generation.deltas():
                pass
        created, model = int(self._clock()), self.backend.model
        if call.request is None:
            return _json(generated(generation, model, created))
        told = completion(call, call.request.model or model, created, generation.choices)
        body: Json | str = self.shaped(told, generation)
        if call.tamper and isinstance(body, dict):
            body = call.tamper(body)
        return _json(body)

    async def _streamed(self, generation: Generation, http: web.Request) -> web.StreamResponse:
        call = generation.call
        assert call.request is not None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        chunks = Chunks(call, call.request.model or self.backend.model, int(self._clock()), generation.choices)

        async def tell(chunk: Json) -> None:
            await response.write(sse(call.tamper(chunk) if call.tamper else chunk))

        told_roles = False
        try:
            async with generation, aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    if not told_roles:
                        told_roles = True
                        for chunk in chunks.roles():
                            await tell(chunk)
                    await tell(chunks.delta(delta))
            if (last := chunks.last()) is not None:
                await tell(last)
        except ApiError as error:
            await response.write(sse(error.body()))
            generation.failed = True
        await response.write(sse("[DONE]"))
        await response.write_eof()
        return response

    # tokens and models ----------------------------------------------------------------------------------------------

    def check_model(self, model: object) -> None:
        if self._any_model or model is None or model == self.backend.model:
            return
        message = f"The model `{model}` does not exist. Valid aliases: {self.backend.model}."
        raise ApiError(message, status=404, type="NotFoundError", param="model")

    async def _tokenize(self, http: web.Request) -> web.Response:
        fields = Fields(await _body(http))
        self.check_model(fields.body.get("model"))
        chat = self.backend.chat
        if "messages" in fields.body:
            tools, _ = read_tools(fields)
            ids = chat.render(
                read_messages(fields),
                tools,
                add_generation_prompt=fields.flag("add_generation_prompt", True),
                continue_final_message=fields.flag("continue_final_message"),
                template_kwargs=fields.mapping("chat_template_kwargs"),
            )
        else:
            if "prompt" not in fields.body:
                fields.missing("prompt")
                fields.check()
            ids = chat.encode("".join(fields.strings("prompt")))
        fields.check()
        strings = chat.pieces(ids) if fields.flag("return_token_strs") else None
        limit = self.backend.max_model_len
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, http: web.Request) -> web.Response:
        fields = Fields(await _body(http))
        self.check_model(fields.body.get("model"))
        if "tokens" not in fields.body:
            fields.missing("tokens")
        ids = fields.integers("tokens")
        fields.check()
        return _json({"prompt": self.backend.chat.decode(ids)})

    async def _models(self, http: web.Request) -> web.Response:
        name = self.backend.model
        model = {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": self.owner,
            "root": name,
            "parent": None,
        }
        return _json(
            {"object": "list", "data": [model | {"max_model_len": self.backend.max_model_len, "permission": []}]}
        )

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.lifecycle.healthy else 503)

    async def _nothing(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, http: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _metrics(self, http: web.Request) -> web.Response:
        """The few of vLLM's gauges that a client watches, in Prometheus' text form."""
        label, stats = f'engine="0",model_name="{self.backend.model}"', self.lifecycle.stats
        counts = {"success": stats.finished, "abort": stats.aborted, "error": stats.failed}
        lines = [f"vllm:num_requests_running{{{label}}} {stats.running}.0"]
        lines += [f'vllm:request_success_total{{finished_reason="{name}",{label}}} {n}.0' for name, n in counts.items()]
        return web.Response(text="\n".join([*lines, ""]))

    # lifecycle ------------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        await self.lifecycle.pause(http.query.get("mode", "abort"))
        return _json({"status": "paused"})

    async def _resume(self, http: web.Request) -> web.Response:
        self.lifecycle.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return _json({"is_paused": self.lifecycle.paused})

    async def _abort(self, http: web.Request) -> web.Response:
        fields = Fields(await _body(http))
        names = [str(name).removeprefix("chatcmpl-") for name in fields.items("request_ids")]
        return _json({"status": "aborted", "aborted": self.lifecycle.abort(names or None)})

    async def _weights(self, http: web.Request) -> web.Response:
        return _json({"weight_version": self.lifecycle.version})

    async def _update_weights(self, http: web.Request) -> web.Response:
        return _json({"message": "Weights updated"})

    async def _finish_weights(self, http: web.Request) -> web.Response:
        version = Fields(await _body(http)).body.get("weight_version")
        if version is not None:
            self.lifecycle.version = str(version)
        return _json({"message": "Weight update finished"})

    async def _set_version(self, http: web.Request) -> web.Response:
        fields = Fields(await _body(http))
        if "new_version" not in fields.body:
            fields.missing("new_version")
        fields.check()
        self.lifecycle.version = str(fields.body["new_version"])
        return _json({"success": True, "new_version": self.lifecycle.version})


def _json(body: Json | str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    text = body if isinstance(body, str) else dumps(body)
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


def _cut(http: web.Request, cut: Disconnect) -> web.StreamResponse:
    """End the connection without ending the answer."""
    if http.transport is not None:
        if cut.reset:
            http.transport.abort()
        else:
            http.transport.close()
    return web.Response(status=499)


async def _body(http: web.Request) -> Any:
    raw = await http.read()
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        at = f"body.{error.pos}" if isinstance(error, json.JSONDecodeError) else "body"
        why = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        note = f", 'ctx': {{'error': {why!r}}}"
        raise invalid(("json_invalid", at, "JSON decode error", {}), note=note) from error
