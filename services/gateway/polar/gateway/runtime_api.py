"""The runtime API: how a grader works inside a session's own box.

    POST /v1/boxes/{session}/{attempt}/exec          {command, cwd?, env?, timeout_s?, stdin?}
         → {return_code, stdout, stderr, timed_out, truncated}
    GET  /v1/boxes/{session}/{attempt}/file?path=    → the bytes
    PUT  /v1/boxes/{session}/{attempt}/file?path=    the bytes → 204

Paths are absolute in the box, or relative to the workspace. Every request bears a box key (`Authorization: Bearer`),
good for one attempt's box. Refusals are `{"error": {"code", "message"}}`: 401 no key, or a forged or expired one; 403
the key of another box; 404 no such box or file; 409 the attempt has not ended, or the box went away meanwhile; 413
too large; 422 a malformed request or a path outside the box; 503 the machine failed.

A client that goes away ends its command. Knows nothing of graders, tasks and rewards.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web

from polar.runtime import Box, BoxGone, PathRefused, RuntimeFailure, TooLarge, TransferFailed
from polar.service.clock import Clock
from polar.service.logs import get_logger
from polar.service.tokens import TokenInvalid, verify_box

from .boxes import Boxes
from .environment import workspace
from .errors import ApiError
from .settings import GatewaySettings
from .state import Books

log = get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MIN_STREAM = 1 << 16  # bytes of each output stream that a client may always ask for


class ExecBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    command: str | list[str]
    """Text is run by the box's shell, a list as it stands."""
    cwd: str | None = None
    env: dict[str, str] = {}
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    stdin: str | None = None


class ExecAnswer(msgspec.Struct, kw_only=True):
    return_code: int | None
    """None: killed, by the timeout where `timed_out`."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """Earlier output is missing."""


class RuntimeApi:
    """The HTTP side of this node's boxes."""

    def __init__(self, settings: GatewaySettings, books: Books, boxes: Boxes, clock: Clock, secret: str) -> None:
        self._settings = settings
        self._books = books
        self._boxes = boxes
        self._clock = clock
        self._secret = secret
        self._turn = asyncio.Semaphore(settings.api_concurrency)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors], client_max_size=self._settings.api_max_bytes)
        place = "/v1/boxes/{session}/{attempt:[0-9]{1,9}}"
        app.router.add_post(f"{place}/exec", self._exec)
        app.router.add_get(f"{place}/file", self._get)
        app.router.add_put(f"{place}/file", self._put)
        return app

    async def _box(self, request: web.Request) -> Box:
        """The box that path and key name; raises ApiError."""
        session, attempt = request.match_info["session"], int(request.match_info["attempt"])
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no_key", "send the box's key as `Authorization: Bearer`")
        try:
            access = verify_box(key.strip(), self._secret, self._clock.now_ms())
        except TokenInvalid as error:
            raise ApiError(401, f"key_{error.reason}", f"the box key is not valid: {error.reason}") from None
        if (access.session_id, access.attempt) != (session, attempt):
            raise ApiError(403, "other_box", "this key is for another box")
        row = await self._books.of_session(session, attempt)
        if row is None or (row.ended and (row.released or not row.box_kept)):
            raise ApiError(404, "no_box", f"this node has no box of session {session}, attempt {attempt}")
        if not row.ended:
            raise ApiError(409, "not_ended", f"the attempt is {row.stage}: its box is the harness's until it has ended")
        box = await self._boxes.find(row)
        if box is None:
            raise ApiError(404, "no_box", "the box has vanished from this machine")
        return box

    async def _exec(self, request: web.Request) -> web.Response:
        box = await self._box(request)
        try:
            body = msgspec.json.decode(await request.read(), type=ExecBody)
        except msgspec.MsgspecError as error:
            raise ApiError(422, "malformed", f"the body is not as it should be: {error}") from None
        if not body.command:
            raise ApiError(422, "malformed", "`command` is empty")
        longest = self._settings.api_max_timeout_s
        async with self._turn:
            outcome = await box.exec(
                body.command,
                cwd=None if body.cwd is None else _in_box(box, body.cwd),
                env=body.env,
                timeout=min(body.timeout_s or longest, longest),
                stdin=None if body.stdin is None else body.stdin.encode(),
                output_limit=max(MIN_STREAM, self._settings.api_max_bytes // 2),
            )
        if outcome.return_code is None and not outcome.timed_out:
            raise ApiError(409, "box_gone", "the command was killed: the box is being taken away")
        answer = ExecAnswer(
            return_code=outcome.return_code,
            stdout=outcome.stdout_text,
            stderr=outcome.stderr_text,
            timed_out=outcome.timed_out,
            truncated=outcome.truncated,
        )
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _get(self, request: web.Request) -> web.Response:
        box = await self._box(request)
        async with self._turn:
            try:
                data = await box.read_file(_path(request, box), max_bytes=self._settings.api_max_bytes)
            except TransferFailed as error:
                raise ApiError(404, "no_file", error.message) from None
        return web.Response(body=data, content_type="application/octet-stream")

    async def _put(self, request: web.Request) -> web.Response:
        box = await self._box(request)
        path = _path(request, box)
        data = await request.read()
        async with self._turn:
            await box.write_file(path, data)
        return web.Response(status=204)


def _path(request: web.Request, box: Box) -> str:
    path = request.query.get("path", "")
    if not path:
        raise ApiError(422, "malformed", "`path` is missing")
    return _in_box(box, path)


def _in_box(box: Box, path: str) -> str:
    return posixpath.join(workspace(box.session_dir, box.spec.workdir), path)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals as JSON. The key is in a header, so nothing logged here holds it."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error.status, error.code, error.message)
    except BoxGone as error:
        return _refusal(409, "box_gone", error.message)
    except (PathRefused, ValueError) as error:
        return _refusal(422, "path_refused" if isinstance(error, PathRefused) else "malformed", str(error))
    except TooLarge as error:
        return _refusal(413, "too_large", error.message)
    except RuntimeFailure as error:
        log.warning("runtime API: the machine failed", path=request.path, error=str(error))
        return _refusal(503, "machine", str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _refusal(413, "too_large", error.text or "too large")
    except web.HTTPException as error:
        return _refusal(error.status, "http", error.text or error.reason)


def _refusal(status: int, code: str, message: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response({"error": {"code": code, "message": message}}, status=status, headers=headers)
