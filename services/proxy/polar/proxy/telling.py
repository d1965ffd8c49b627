"""How a client is told: whole, or streamed with the headers as late as it allows.

Promises: `tell` says that the client has all of its reply, once, and only if that is so as far as it can be known here:
all of it was handed to the operating system while the connection stood. It knows aiohttp, and of dialects what each is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from polar.service.clock import Clock

from .audience import Outcome
from .calls import Call, Delta
from .dialects import Dialect, StreamEncoder, Told
from .errors import ClientGone, ProxyError, as_told
from .reply import StreamedReply, finished, handed_over
from .settings import ProxySettings


class Client:
    """The audience of one connection. `out` is None for a reply that is not streamed."""

    def __init__(
        self, dialect: Dialect, encoder: StreamEncoder | None = None, out: StreamedReply | None = None
    ) -> None:
        self._dialect = dialect
        self._encoder = encoder
        self._out = out

    def answered(self) -> bool:
        return self._out is not None and self._out.opened

    def status(self, error: ProxyError) -> int:
        return self._dialect.status(error)

    def prompt(self, tokens: int) -> None:
        if self._encoder is not None:
            self._encoder.prompt(tokens)

    async def tell(self, deltas: Sequence[Delta]) -> None:
        if self._encoder is not None and self._out is not None and (data := self._encoder.deltas(deltas)):
            await self._out.send(data)


async def tell(
    request: web.Request,
    dialect: Dialect,
    call: Call,
    told: Told,
    *,
    hear: Callable[[Client], Awaitable[Outcome]],
    has_all: Callable[[], None],
    before_early: Callable[[StreamEncoder], Awaitable[bool]],
    settings: ProxySettings,
    clock: Clock,
) -> web.StreamResponse:
    """Answer a request with what its client is to `hear`; `has_all` is called at once when it has all of a reply.

    Raises:
        ProxyError: instead of a reply, while the client has no status yet.
    """
    headers = dialect.headers(told.completion_id)
    if not call.stream:
        reply = (await hear(Client(dialect))).reply
        body = dialect.reply(call, told, reply)
        whole = web.Response(body=body, content_type="application/json", headers=headers)
        if await finished(request, whole):
            has_all()
        return whole
    encoder = dialect.stream(call, told)
    async with StreamedReply(
        request,
        encoder,
        clock,
        headers=headers,
        early_headers_after=settings.early_headers_after,
        keepalive_every=settings.keepalive_every,
        before_early=lambda: before_early(encoder),
    ) as out:
        try:
            outcome = await hear(Client(dialect, encoder, out))
            response = await out.end(encoder.deltas(outcome.rest) + encoder.finish(outcome.reply))
            if await handed_over(request):
                has_all()  # a client may close its connection before anything else is done here
            return response
        except ClientGone:
            return out.response
        except Exception as error:
            if await out.silent():
                raise
            # a second answer cannot follow the first one's headers, so a bug ends here too
            return await _ended(out, encoder.error(as_told(error)))


async def _ended(out: StreamedReply, last: bytes) -> web.StreamResponse:
    try:
        return await out.end(last)
    except ClientGone:
        return out.response
