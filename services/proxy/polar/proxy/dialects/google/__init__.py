"""Google's generateContent (https://ai.google.dev/api/generate-content), with countTokens and models.

Pure translation: no I/O, no clock, no session. `fields` says what becomes of every field of a request.
"""

from __future__ import annotations

from ...calls import Call, Json, Reply
from ...errors import ProxyError
from ..base import Dialect, Limits, StreamEncoder, Told
from .errors import body_of, status_of
from .fields import FIELDS
from .reply import Encoder, encoded, whole
from .request import read, read_count

__all__ = ["FIELDS", "GoogleGenerate"]


class GoogleGenerate(Dialect):
    """The dialect `google.generate_content`, for one request: here the path says what a body says elsewhere.

    `sse`: a stream is one of server-sent events (`alt=sse`); else it is one JSON array.
    """

    name = "google.generate_content"

    def __init__(self, model: str = "", *, stream: bool = False, sse: bool = True) -> None:
        self._model = model
        self._stream = stream
        self._sse = sse

    def parse(self, body: bytes, limits: Limits) -> Call:
        return read(body, limits, dialect=self.name, model=self._model, stream=self._stream)

    def parse_count(self, body: bytes, limits: Limits) -> Call:
        """The call whose prompt is to be counted."""
        return read_count(body, limits, dialect=self.name, model=self._model)

    def counted(self, tokens: int) -> bytes:
        """The answer to countTokens."""
        return encoded({"totalTokens": tokens})

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        return whole(call, told, reply)

    def stream(self, call: Call, told: Told) -> StreamEncoder:
        return Encoder(call, told, sse=self._sse)

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        return body_of(error)

    def status(self, error: ProxyError) -> int:
        return status_of(error)

    def headers(self, request_id: str) -> dict[str, str]:
        found = super().headers(request_id)
        if self._stream and not self._sse:
            found["Content-Type"] = "application/json; charset=utf-8"
        return found

    def model(self, name: str, max_tokens: int | None) -> Json:
        """A model, as GET /v1beta/models/{name} tells it; `max_tokens`: of prompt and reply together."""
        limits = {} if max_tokens is None else {"inputTokenLimit": max_tokens, "outputTokenLimit": max_tokens}
        return {
            "name": f"models/{name}",
            "version": "001",
            "displayName": name,
            "description": "The model behind this door.",
            **limits,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def models(self, models: list[Json]) -> Json:
        """A page of models; the only one."""
        return {"models": models}
