"""The session's own box, through its gateway's runtime API. Knows HTTP and nothing of grades.

The key is for one box and is never logged. Going away in the middle of a command ends the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from polar.schemas import BoxAccess

from .errors import BoxError

SLACK_S: Final = 30.0
"""How much longer than a command's own limit its answer may take."""
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    return_code: int | None
    """None: killed."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool


class BoxClient:
    """One box."""

    def __init__(
        self, http: aiohttp.ClientSession, access: BoxAccess, session_id: str, attempt: int, *, patience_s: float
    ) -> None:
        """`patience_s`: for so long a gateway that refuses connections is tried again; nothing was sent to it then."""
        self._patience_s = patience_s
        self.workdir = access.workdir
        self._http = http
        self._url = f"{access.url.rstrip('/')}/v1/boxes/{session_id}/{attempt}"
        self._headers = {"Authorization": f"Bearer {access.key}"}

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: str | None = None,
    ) -> ExecResult:
        """Runs a command in the box.

        Raises:
            BoxError: refused or not reached.
        """
        body = {
            "command": command if isinstance(command, str) else list(command),
            "env": dict(env or {}),
            "timeout_s": timeout_s,
        }
        cwd = cwd or self.workdir
        if cwd is not None:
            body["cwd"] = cwd
        if stdin is not None:
            body["stdin"] = stdin
        data = await self._ask("POST", "/exec", total_s=timeout_s + SLACK_S, json=body)
        try:
            return msgspec.json.decode(data, type=ExecResult)
        except msgspec.MsgspecError as error:
            raise BoxError(f"the gateway's answer is not readable: {error}", retryable=True) from None

    async def read(self, path: str, *, timeout_s: float = 60.0) -> bytes:
        """A file's bytes.

        Raises:
            BoxError: no such file, refused or not reached.
        """
        return await self._ask("GET", "/file", total_s=timeout_s, params={"path": path})

    async def write(self, path: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Writes a file.

        Raises:
            BoxError: refused or not reached.
        """
        await self._ask("PUT", "/file", total_s=timeout_s, params={"path": path}, data=data)

    async def _ask(self, method: str, path: str, *, total_s: float, **request: Any) -> bytes:
        trying = AsyncRetrying(
            retry=retry_if_exception_type(aiohttp.ClientConnectorError),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        try:
            return await trying(self._once, method, path, total_s, request)
        except TimeoutError as error:
            raise BoxError(f"the gateway did not answer {method} {path} within {total_s:g} s") from error
        except aiohttp.ClientError as error:
            raise BoxError(f"the gateway cannot be reached for {method} {path}: {error}", retryable=True) from error

    async def _once(self, method: str, path: str, total_s: float, request: Mapping[str, Any]) -> bytes:
        async with self._http.request(
            method,
            self._url + path,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=self._http.timeout.sock_connect),
            **request,
        ) as answer:
            data = await answer.read()
            if answer.status >= 300:
                raise BoxError(
                    f"the gateway refused {method} {path}: {answer.status} {_said(data)}",
                    retryable=answer.status in _AGAIN,
                )
            return data


def _said(data: bytes) -> str:
    """The message of an error answer, or its beginning."""
    try:
        error = msgspec.json.decode(data)["error"]
        return f"{error['code']}: {error['message']}"
    except (msgspec.MsgspecError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
