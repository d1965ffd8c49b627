"""The HTTP surface: an explicit table of routes, each with or without the key in its path.

Promises: only the listed routes generate; everything else is answered in the dialect's error shape and reaches no
engine; neither paths (they may hold keys) nor bodies are logged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from .dialects import Dialect, OpenAIChat
from .errors import BadRequest, ProxyError, as_told
from .generate import Generations
from .metrics import Metrics
from .sessions import Sessions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY_PREFIX = "/s/{key}"


class Routes:
    """The handlers. `ready` says whether calls are taken."""

    def __init__(
        self,
        sessions: Sessions,
        generations: Generations,
        metrics: Metrics,
        *,
        ready: Callable[[], bool],
    ) -> None:
        self._sessions = sessions
        self._generations = generations
        self._metrics = metrics
        self._ready = ready
        self._chat = OpenAIChat()

    def application(self, max_body_bytes: int) -> web.Application:
        """The aiohttp application."""

        @web.middleware
        async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except web.HTTPException as error:
                return self._error(_of_http(error))
            except Exception as error:  # noqa: BLE001 - the last boundary: a client gets JSON, whatever happened
                return self._error(as_told(error))

        app = web.Application(client_max_size=max_body_bytes, middlewares=[answer_errors])
        app.add_routes([web.get("/health", self._health), web.get("/ready", self._readiness)])
        for prefix in ("", KEY_PREFIX):
            app.add_routes(
                [
                    web.post(f"{prefix}/v1/chat/completions", self._chat_completions),
                    web.get(f"{prefix}/v1/models", self._models),
                    web.get(f"{prefix}/v1/models/{{model:.+}}", self._model),
                ]
            )
        return app

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generations.handle(request, self._dialect(), key_of(request))

    def _dialect(self) -> Dialect:
        return self._chat

    async def _models(self, request: web.Request) -> web.Response:
        token = self._sessions.admit(key_of(request))
        return web.json_response({"object": "list", "data": [_model(token.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._sessions.admit(key_of(request))
        # whatever name a harness was told stands for the one model behind this door
        return web.json_response(_model(request.match_info["model"]))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readiness(self, request: web.Request) -> web.Response:
        ready = self._ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    def _error(self, error: ProxyError) -> web.Response:
        headers = {}
        if error.retry_after is not None:
            headers["Retry-After"] = f"{error.retry_after:g}"
        elif error.status in (401, 409):
            # some clients retry a 409 by themselves; this one never gets better
            headers["X-Should-Retry"] = "false"
        return web.json_response(self._chat.error(error), status=error.status, headers=headers)


def key_of(request: web.Request) -> str | None:
    """The session key: in the path, as bearer token, or as `x-api-key`."""
    if "key" in request.match_info:
        return request.match_info["key"]
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key")


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
