"""The trainer's and operator's routes: what the engines are and do, and their pauses for new weights.

They take a key of their own, never a session's: whoever has a session must not be able to stop all others. They speak
of this replica only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from aiohttp import web

from ..errors import BadRequest, KeyRefused, ProxyError
from .engines import Engines
from .pausing import Mode, Pauses, state
from .upstream import Upstream

PATH = "/polar/v1/engines"
LONGEST_S = 3_600.0


def key_of_installation(secret: str) -> str:
    """The operator's key where none is set. Not the secret: whoever pauses engines need not be able to sign keys."""
    return hmac.new(secret.encode(), b"polar.operator", hashlib.sha256).hexdigest()


class NotIdle(ProxyError):
    """The engines are paused, and calls still run."""

    status = 504
    code = "calls_still_run"
    retryable = True


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[str] | None = None


class _Pause(_Named, forbid_unknown_fields=True):
    mode: Mode = "drain"
    within_s: float = 60.0


BodyT = TypeVar("BodyT", bound=_Named)


class Trainers:
    """The handlers. `key` opens them."""

    def __init__(self, engines: Engines, pauses: Pauses, key: str) -> None:
        self._engines = engines
        self._pauses = pauses
        self._key = key.encode()

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.get(PATH, self._state)
        yield web.post(f"{PATH}/pause", self._pause)
        yield web.post(f"{PATH}/resume", self._resume)

    async def _state(self, request: web.Request) -> web.Response:
        self._admit(request)
        return await self._told(self._engines.all)

    async def _pause(self, request: web.Request) -> web.Response:
        self._admit(request)
        asked = await _read(request, _Pause)
        if not 0 < asked.within_s <= LONGEST_S:
            raise BadRequest(f"within_s is between 0 and {LONGEST_S:g}", param="within_s")
        upstreams = self._named(asked)
        idle = await self._pauses.pause(upstreams, asked.mode, asked.within_s)
        if any(one.pause_mode is None for one in upstreams):
            raise BadRequest("The engines were resumed while they were being paused.", status=409, code="resumed")
        if not idle:
            left = sum(one.line.sizes[0] for one in upstreams)
            raise NotIdle(
                f"The engines are paused, and {left} calls still run after {asked.within_s:g} s: ask again, or with "
                'mode "abort".'
            )
        return await self._told(upstreams)

    async def _resume(self, request: web.Request) -> web.Response:
        self._admit(request)
        upstreams = self._named(await _read(request, _Named))
        await self._pauses.resume(upstreams)
        return await self._told(upstreams)

    async def _told(self, upstreams: list[Upstream]) -> web.Response:
        return web.json_response({"engines": await asyncio.gather(*(state(one) for one in upstreams))})

    def _named(self, asked: _Named) -> list[Upstream]:
        found = self._engines.named(asked.endpoints)
        if found is None:
            known = ", ".join(one.url for one in self._engines.all)
            raise BadRequest(f"There is no such engine here; there are {known}.", status=404, param="endpoints")
        return found

    def _admit(self, request: web.Request) -> None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode(errors="surrogateescape")  # a header may hold any bytes
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._key):
            raise KeyRefused("This takes the operator's key (POLAR_PROXY_OPERATOR_KEY), not a session's.")


async def _read(request: web.Request, kind: type[BodyT]) -> BodyT:
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not understood: {error}") from None
