"""The HTTP surface: an explicit table of routes, each with or without the key in its path.

Promises: only the listed routes generate; everything else is answered in the dialect's error shape and reaches no
engine; neither paths (they may hold keys) nor bodies are logged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from .dialects import AnthropicMessages, Dialect, OpenAIChat, OpenAIResponses
from .dialects.responses import Responses
from .errors import BadRequest, ProxyError, as_told, retry_headers
from .generate import REQUEST_ID, Generations
from .google import GoogleRoutes, google_key, is_googles
from .metrics import Metrics
from .sessions import Sessions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY_PREFIX = "/s/{key}"
ANTHROPIC_VERSION = "anthropic-version"
ANTHROPIC_PATHS = ("/v1/messages", "/api/")
RESPONSES_PATH = "/v1/responses"
TELEMETRY = (
    "/api/event_logging/{rest:.*}",
    "/api/claude_code/metrics",
    "/api/claude_cli_feedback",
    "/api/claude_code_shared_session_transcripts",
)
"""What Claude Code 2.1.329 posts of itself: taken, and not read."""


class Routes:
    """The handlers. `ready` says whether calls are taken; `new_id` makes the id of an answer that is no call's; `more`
    are routes of others.
    """

    def __init__(
        self,
        sessions: Sessions,
        generations: Generations,
        metrics: Metrics,
        responses: Responses,
        *,
        ready: Callable[[], bool],
        new_id: Callable[[], str],
        more: Iterable[web.RouteDef] = (),
    ) -> None:
        self._sessions = sessions
        self._generations = generations
        self._metrics = metrics
        self._ready = ready
        self._more = tuple(more)
        self._new_id = new_id
        self._chat = OpenAIChat()
        self._anthropic = AnthropicMessages()
        self._google = GoogleRoutes(sessions, generations, key_of=key_of, new_id=new_id)
        self._told = responses
        self._responses = OpenAIResponses(responses.nobody())
        """Of errors; a session has its own."""

    def application(self, max_body_bytes: int) -> web.Application:
        """The aiohttp application."""

        @web.middleware
        async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except web.HTTPException as error:
                return self._error(request, _of_http(error))
            except Exception as error:  # noqa: BLE001 - the last boundary: a client gets JSON, whatever happened
                return self._error(request, as_told(error))

        app = web.Application(client_max_size=max_body_bytes, middlewares=[answer_errors])
        app.add_routes([web.get("/health", self._health), web.get("/ready", self._readiness), *self._more])
        for prefix in ("", KEY_PREFIX):
            app.add_routes(
                [
                    web.post(f"{prefix}/v1/chat/completions", self._chat_completions),
                    web.post(f"{prefix}/v1/messages", self._messages),
                    web.post(f"{prefix}/v1/messages/count_tokens", self._count_tokens),
                    web.post(f"{prefix}/v1/responses", self._respond),
                    web.get(f"{prefix}/v1/responses", self._upgrade),
                    web.post(f"{prefix}/v1/responses/input_tokens", self._input_tokens),
                    web.get(f"{prefix}/v1/responses/{{response}}", self._retrieve),
                    web.get(f"{prefix}/v1/models", self._models),
                    web.get(f"{prefix}/v1/models/{{model:.+}}", self._model),
                    # what Claude Code asks to see whether it is connected, with GET or HEAD
                    web.get(f"{prefix}/api/hello", self._hello),
                    *(web.post(prefix + path, self._taken) for path in TELEMETRY),
                    *self._google.of(prefix),
                ]
            )
        return app

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generations.handle(request, self._chat, key_of(request))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generations.handle(request, self._anthropic, key_of(request))

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        answer = await self._generations.count(request, self._anthropic, key_of(request))
        answer.headers.update(self._anthropic.headers(self._new_id()))
        return answer

    def _responses_of(self, request: web.Request) -> OpenAIResponses:
        return OpenAIResponses(self._told.of(self._sessions.admit(key_of(request))))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._generations.handle(request, self._responses_of(request), key_of(request))

    async def _upgrade(self, request: web.Request) -> web.Response:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            # at this status Codex goes on with POST at once; at a 404 it tries seven times
            raise BadRequest("There is no WebSocket here; POST.", status=426, code="upgrade_required")
        raise BadRequest("This path does not take this method.", status=405, code="method_not_allowed")

    async def _input_tokens(self, request: web.Request) -> web.Response:
        answer = await self._generations.count(request, self._responses_of(request), key_of(request))
        answer.headers.update(self._responses.headers(self._new_id()))
        return answer

    async def _retrieve(self, request: web.Request) -> web.Response:
        found = self._responses_of(request).retrieved(request.match_info["response"])
        headers = self._responses.headers(self._new_id())
        return web.Response(body=found, content_type="application/json", headers=headers)

    async def _models(self, request: web.Request) -> web.Response:
        if is_googles(request, _without_key(request.path)):
            return await self._google.models(request)
        token = self._sessions.admit(key_of(request))
        if ANTHROPIC_VERSION in request.headers:
            length = self._generations.max_model_len(token)
            body = self._anthropic.models([self._anthropic.model(token.model, length)])
            return web.json_response(body, headers=self._anthropic.headers(self._new_id()))
        return web.json_response({"object": "list", "data": [_model(token.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        if is_googles(request, _without_key(request.path)):
            return await self._google.model(request)
        token = self._sessions.admit(key_of(request))
        # whatever name a harness was told stands for the one model behind this door
        name = request.match_info["model"]
        if ANTHROPIC_VERSION in request.headers:
            body = self._anthropic.model(name, self._generations.max_model_len(token))
            return web.json_response(body, headers=self._anthropic.headers(self._new_id()))
        return web.json_response(_model(name))

    async def _hello(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "hello"})

    async def _taken(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self._ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    def _error(self, request: web.Request, error: ProxyError) -> web.Response:
        dialect = self._dialect_of(request)
        request_id = request.get(REQUEST_ID) or self._new_id()
        return web.json_response(
            dialect.error(error, request_id),
            status=dialect.status(error),
            headers=dialect.headers(request_id) | retry_headers(error),
        )

    def _dialect_of(self, request: web.Request) -> Dialect:
        """Whose errors a client understands: by the path, else by what it calls itself."""
        path = _without_key(request.path)
        if is_googles(request, path):
            return self._google.dialect
        if path.startswith(ANTHROPIC_PATHS) or ANTHROPIC_VERSION in request.headers:
            return self._anthropic
        if path.startswith(RESPONSES_PATH):
            return self._responses
        return self._chat


def key_of(request: web.Request) -> str | None:
    """The session key: in the path, as bearer token, as `x-api-key`, or where Google's clients put it."""
    if "key" in request.match_info:
        return request.match_info["key"]
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key") or google_key(request)


def _without_key(path: str) -> str:
    return "/" + path.removeprefix("/s/").partition("/")[2] if path.startswith("/s/") else path


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "polar"}


def _of_http(error: web.HTTPException) -> BadRequest:
    match error.status:
        case 404:
            return BadRequest("There is no such path here.", status=404, code="unknown_url")
        case 405:
            return BadRequest("This path does not take this method.", status=405, code="method_not_allowed")
        case 413:
            return BadRequest("The request body is too large.", status=413, code="request_too_large")
        case status:
            return BadRequest(error.reason or "The request was not understood.", status=status)
