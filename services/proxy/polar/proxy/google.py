"""The routes of Google's API: here a path names the model and what is asked of it, and the query how a stream is told.

https://ai.google.dev/api/generate-content. It knows HTTP, and of the dialect only its name and its models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from aiohttp import web

from .dialects import GoogleGenerate
from .generate import Generations
from .sessions import Sessions

VERSIONS = ("v1", "v1beta", "v1alpha")
KEY_HEADER = "x-goog-api-key"
KEY_QUERY = "key"
OWN_PATHS = ("/v1beta/", "/v1alpha/", "/v1internal", "/upload/")
"""Nobody else's; the last two are asked by Google's clients and not here."""
ACTIONS = re.compile(r"\A/v1/models/.*:[A-Za-z]+\Z")

Key = Callable[[web.Request], str | None]


def is_googles(request: web.Request, path: str) -> bool:
    """Whether the client understands Google's form; `path` is without a key."""
    if path.startswith(OWN_PATHS) or KEY_HEADER in request.headers or KEY_QUERY in request.query:
        return True
    return request.method == "POST" and ACTIONS.match(path) is not None


def google_key(request: web.Request) -> str | None:
    """The session's key where Google's clients put it."""
    return request.headers.get(KEY_HEADER) or request.query.get(KEY_QUERY)


class GoogleRoutes:
    """The handlers; `key_of` finds the session's key in a request, `new_id` makes the id of an answer that is no
    call's.
    """

    def __init__(self, sessions: Sessions, generations: Generations, *, key_of: Key, new_id: Callable[[], str]) -> None:
        self.dialect = GoogleGenerate()
        """Of what no request for a model asks."""
        self._sessions = sessions
        self._generations = generations
        self._key_of = key_of
        self._new_id = new_id

    def of(self, prefix: str) -> Iterable[web.RouteDef]:
        """The routes below `prefix`. `GET /v1/models` is other providers' too, so it is not among them."""
        for version in VERSIONS:
            model = f"{prefix}/{version}/models/{{model:.+}}"
            yield web.post(f"{model}:generateContent", self._generate)
            yield web.post(f"{model}:streamGenerateContent", self._stream)
            yield web.post(f"{model}:countTokens", self._count)
            if version != "v1":
                yield web.get(f"{prefix}/{version}/models", self.models)
                yield web.get(model, self.model)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        dialect = GoogleGenerate(request.match_info["model"])
        return await self._generations.handle(request, dialect, self._key_of(request))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        sse = request.query.get("alt", "json").lower() == "sse"
        dialect = GoogleGenerate(request.match_info["model"], stream=True, sse=sse)
        return await self._generations.handle(request, dialect, self._key_of(request))

    async def _count(self, request: web.Request) -> web.Response:
        dialect = GoogleGenerate(request.match_info["model"])
        answer = await self._generations.count(request, dialect, self._key_of(request))
        answer.headers.update(dialect.headers(self._new_id()))
        return answer

    async def models(self, request: web.Request) -> web.Response:
        """The one model of the session."""
        token = self._sessions.admit(self._key_of(request))
        one = self.dialect.model(token.model, self._generations.max_model_len(token))
        return web.json_response(self.dialect.models([one]), headers=self.dialect.headers(self._new_id()))

    async def model(self, request: web.Request) -> web.Response:
        """Whatever name a harness was told stands for the one model behind this door."""
        token = self._sessions.admit(self._key_of(request))
        one = self.dialect.model(request.match_info["model"], self._generations.max_model_len(token))
        return web.json_response(one, headers=self.dialect.headers(self._new_id()))
