"""Who may generate, and what is asked: key, slot, body, sampling, room. What follows is `generation`'s."""

from __future__ import annotations

import asyncio

from aiohttp import web

from polar.schemas import CallStarted, ClientHints, sha256
from polar.service.randomness import new_id
from polar.service.tokens import SessionToken

from .calls import Call
from .dialects import Counting, Dialect, Limits
from .errors import BadRequest, EngineError
from .generation import Deps, Generation, placed
from .joining import Key
from .record import hints
from .resends import resend_key
from .sampling import resolve
from .slots import Slots

REQUEST_ID = web.RequestKey("request_id", str)
"""What an answer is known by; a call's is its completion id."""


class Generations:
    """Answers the requests that generate."""

    def __init__(self, deps: Deps, slots: Slots) -> None:
        self._deps = deps
        self._slots = slots
        settings = deps.settings
        self._limits = Limits(
            max_choices=settings.max_choices,
            provider_tools=settings.provider_tools,
            foreign_thinking=settings.foreign_thinking,
            image_urls=settings.image_urls,
            thinking_switch=settings.thinking_switch,
        )

    async def handle(self, request: web.Request, dialect: Dialect, key: str | None) -> web.StreamResponse:
        """Answer one request. Raises `ProxyError` while the client has no status yet."""
        deps = self._deps
        token = deps.sessions.admit(key)
        free = self._slots.take()
        try:
            body = await self._body(request)
            call = dialect.parse(body, self._limits)
            said = hints(request.headers, call.marks, call.messages, call.tools)
            resend = resend_key(token, dialect.name, request.raw_path, said, sha256(body))
            earlier = deps.resends.join(resend)
            if earlier is None:
                generation = self._new(dialect, token, call, said, resend)
        except BaseException:
            free()
            raise
        if earlier is not None:
            free()  # the call that is joined has a slot of its own, or needs none any more
            request[REQUEST_ID] = earlier.told.completion_id
            return await deps.resends.answer_again(earlier, request, dialect, call)
        request[REQUEST_ID] = generation.told.completion_id
        return await deps.resends.answer(generation, request, dialect, call, resend, free)

    def _new(self, dialect: Dialect, token: SessionToken, call: Call, said: ClientHints, resend: Key) -> Generation:
        """The call that a request asks for, which has not begun."""
        deps = self._deps
        if call.unknown:
            deps.metrics.unknown_fields.labels(dialect.name).inc(call.unknown)
        if call.dropped:
            deps.metrics.dropped.labels(dialect.name).inc(len(call.dropped))
        number = deps.sessions.next_call(token, call.turns)
        sampling = resolve(token.sampling, call.asked, n=call.n, session_id=token.session_id, call=number)
        endpoint = deps.engines.of(token.session_id, token.model).endpoint
        started = CallStarted(
            completion_id=new_id(deps.clock, deps.randomness),
            session_id=token.session_id,
            attempt=token.attempt,
            call=number,
            dialect=dialect.name,
            at_ms=deps.clock.now_ms(),
        )
        return Generation(
            deps,
            token,
            call,
            sampling,
            endpoint,
            started,
            request_sha256=resend.body,
            said=said,
            retry_of=deps.resends.retried(resend),
        )

    async def count(self, request: web.Request, dialect: Counting, key: str | None) -> web.Response:
        """Answer a request that only counts its prompt: nothing is generated, nothing captured."""
        deps = self._deps
        token = deps.sessions.admit(key)
        free = self._slots.take()
        try:
            call = dialect.parse_count(await self._body(request), self._limits)
            endpoint = deps.engines.of(token.session_id, token.model).endpoint
            count = await endpoint.count(await placed(call, endpoint, deps.settings.late_system))
        finally:
            free()
        return web.Response(body=dialect.counted(count.tokens), content_type="application/json")

    def max_model_len(self, token: SessionToken) -> int | None:
        """What the session's engine takes of prompt and reply together, as far as it is known by now."""
        try:
            return self._deps.engines.of(token.session_id, token.model).endpoint.max_model_len
        except EngineError:
            return None

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._deps.settings.body_timeout):
                return await request.read()
        except TimeoutError:
            raise BadRequest("The request's body did not come in time.", status=408) from None
        except web.RequestPayloadError:
            raise BadRequest("The request's body is not what its headers say of its coding or length.") from None
