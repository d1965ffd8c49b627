"""One call under way: bracket, engine, capture, reply, in that order.

What a client is told, and when, is decided here and nowhere else: text as it comes (live), and nothing that closes
before the broker's word. Live and synthetic differ in one step, how the engine is asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from aiohttp import web
from msgspec.structs import replace

from polar.schemas import CallStarted, CompletionCaptured, RecordRef, Sampling
from polar.service.clock import Clock
from polar.service.randomness import Randomness
from polar.service.tokens import SessionToken

from .answer import Answer
from .calls import Call, Reply
from .capture import Acknowledged, Bracket, Recorder
from .dialects import Dialect, StreamEncoder, Told
from .early import Stop, count_first, measured
from .engine import Endpoint, Engines, cache_salt, request_body
from .errors import ClientGone, EngineAway, EngineBroken, EngineError, PromptTooLong, ProxyError, as_told
from .gate import Gate
from .history import Histories
from .metrics import Metrics
from .placing import fold_late_system, has_late_system
from .record import Facts, captured, hints
from .reply import StreamedReply
from .sampling import engine_fields
from .selftest import check_mode
from .sessions import Sessions
from .settings import ProxySettings

CUT = ("abort", "error")
"""Finish reasons of a reply that the engine did not let end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """What generations share."""

    settings: ProxySettings
    sessions: Sessions
    recorder: Recorder
    engines: Engines
    histories: Histories | None
    """None: prompts are written whole."""
    metrics: Metrics
    clock: Clock
    randomness: Randomness
    max_record_bytes: int


async def placed(call: Call, endpoint: Endpoint, late_system: str) -> Call:
    """`call` with its system messages where the engine's chat template takes them."""
    if late_system == "keep" or not has_late_system(call.messages):
        return call
    if late_system == "auto" and await endpoint.takes_late_system():
        return call
    return dataclasses.replace(call, messages=fold_late_system(call.messages))


class Generation:
    """One call under way."""

    def __init__(
        self,
        deps: Deps,
        request: web.Request,
        dialect: Dialect,
        token: SessionToken,
        call: Call,
        sampling: Sampling,
        endpoint: Endpoint,
        started: CallStarted,
        request_sha256: str,
    ) -> None:
        self._deps = deps
        self._request = request
        self._dialect = dialect
        self._token = token
        self._call = call
        self._sampling = sampling
        self._endpoint = endpoint
        self._started = started
        self._request_sha256 = request_sha256
        self._told = Told(started.completion_id, started.at_ms // 1000, call.model)
        self._answer = Answer(call.n, keep_entries=call.logprobs)
        self._gate = Gate(call.n)
        self._stop = Stop()
        self._facts: Facts | None = None
        self._before: str | None = None
        self._first_token_ms: int | None = None

    async def run(self, settled: Callable[[], None]) -> web.StreamResponse:
        """Answer the request; `settled` is called when nothing of the call is left to write to the log."""
        if not self._call.stream:
            bracket = Bracket(self._deps.recorder, self._started, settled, status=self._dialect.status)
            with self._counted():
                reply = await self._bracketed(bracket, None, None)
            body = self._dialect.reply(self._call, self._told, reply)
            headers = self._dialect.headers(self._started.completion_id)
            return web.Response(body=body, content_type="application/json", headers=headers)
        settings = self._deps.settings
        encoder = self._dialect.stream(self._call, self._told)
        async with StreamedReply(
            self._request,
            encoder,
            self._deps.clock,
            headers=self._dialect.headers(self._started.completion_id),
            early_headers_after=settings.early_headers_after,
            keepalive_every=settings.keepalive_every,
            before_early=lambda: count_first(self._endpoint, self._call, encoder, self._stop),
        ) as out:
            bracket = Bracket(
                self._deps.recorder,
                self._started,
                settled,
                answered=lambda: out.opened,
                status=self._dialect.status,
            )
            try:
                with self._counted():
                    reply = await self._bracketed(bracket, encoder, out)
                rest = self._gate.rest() if self._live else reply.deltas()
                return await out.end(encoder.deltas(rest) + encoder.finish(reply))
            except ClientGone:
                return out.response
            except Exception as error:
                if await out.silent():
                    raise
                # a second answer cannot follow the first one's headers, so a bug ends here too
                return await out.end(encoder.error(as_told(error)))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        outcome = "failed"
        try:
            yield
            outcome = "captured"
        except ProxyError as error:
            outcome = error.code or f"http_{error.status}"
            raise
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        finally:
            self._deps.metrics.calls.labels(self._dialect.name, outcome).inc()

    async def _bracketed(self, bracket: Bracket, encoder: StreamEncoder | None, out: StreamedReply | None) -> Reply:
        """From `CallStarted` to the acknowledged capture: what comes after may close."""
        async with bracket:
            try:
                with self._stop.here(), self._deps.sessions.running(self._token):
                    await self._asked(encoder, out)
                reply = self._answer.reply()
                after = await self._version_after(reply)
            except (ProxyError, asyncio.CancelledError) as error:
                self._keep_partial(bracket, error)
                raise
            cut = next((choice.finish for choice in reply.choices if choice.finish in CUT), None)
            if cut is None or self._answer.sampled:
                await self._capture(bracket, reply, after, complete=cut is None)
            if cut is not None:
                raise EngineAway(f"the engine broke the generation off ({cut}); try again", retry_after=1.0)
        return reply

    @property
    def _live(self) -> bool:
        return self._call.stream and self._deps.settings.stream_mode == "live"

    async def _asked(self, encoder: StreamEncoder | None, out: StreamedReply | None) -> None:
        try:
            await self._ask(encoder, out)
        except PromptTooLong as error:
            raise await measured(error, self._endpoint, self._call) from None

    async def _ask(self, encoder: StreamEncoder | None, out: StreamedReply | None) -> None:
        """Ask the engine; in live mode, tell the client what may be told meanwhile."""
        deps, token, endpoint = self._deps, self._token, self._endpoint
        engine = await endpoint.identity()
        check_mode(engine.logprobs_mode, self._sampling.temperature)
        self._call = await placed(self._call, endpoint, deps.settings.late_system)
        self._facts = Facts(
            token=token,
            started=self._started,
            call=self._call,
            sampling=self._sampling,
            engine=engine,
            request_sha256=self._request_sha256,
            hints=hints(self._request.headers, self._call.marks),
            image_token=deps.settings.image_token_id,
        )
        self._before = await endpoint.weight_version()
        body = request_body(
            self._call,
            engine.model,
            engine_fields(self._sampling),
            cache_salt=cache_salt(token.tenant, self._before),
        )
        left = max((token.not_after_ms - deps.clock.now_ms()) / 1000, 0.001)
        timeout = min(deps.settings.call_timeout, left)
        request_id = self._started.completion_id
        if not self._live:
            await endpoint.whole(body, self._answer, request_id=request_id, timeout=timeout)
            return
        assert encoder is not None
        assert out is not None
        stream = endpoint.stream(body, self._answer, request_id=request_id, timeout=timeout)
        async with aclosing(stream) as arrivals:
            async for deltas in arrivals:
                if self._first_token_ms is None and self._answer.sampled:
                    self._first_token_ms = deps.clock.now_ms()
                if self._answer.prompt_tokens is not None:
                    encoder.prompt(self._answer.prompt_tokens)
                told = [passed for delta in deltas if (passed := self._gate.admit(delta)) is not None]
                if data := encoder.deltas(told):
                    await out.send(data)

    async def _version_after(self, reply: Reply) -> str | None:
        """The engine's word on its weights after the call, where its answer does not tell."""
        if self._before is None or all(choice.versions for choice in reply.choices):
            return None
        try:
            return await self._endpoint.weight_version()
        except EngineError:
            return None  # what it sampled is whole; only whose weights did it stays unknown

    async def _capture(self, bracket: Bracket, reply: Reply, after: str | None, *, complete: bool) -> None:
        assert self._facts is not None
        record = captured(
            self._facts,
            reply,
            before=self._before,
            after=after,
            first_token_ms=self._first_token_ms,
            ended_ms=self._deps.clock.now_ms(),
            complete=complete,
        )
        self._deps.metrics.tokens.inc(self._answer.sampled)
        with self._deps.metrics.ack.time():
            await bracket.capture(*self._against_earlier(bracket, record))

    def _against_earlier(
        self, bracket: Bracket, record: CompletionCaptured
    ) -> tuple[CompletionCaptured, Acknowledged | None]:
        """`record` with its prompt as it is to be written, and who is told where it stands."""
        histories, token, sessions = self._deps.histories, self._token, self._deps.sessions
        if histories is None:
            return record, None
        draft = histories.draft(token, bracket.at, record.prompt)
        written = replace(record, prompt=draft.prompt)

        def acknowledged(at: RecordRef) -> None:
            if not sessions.over(token):
                histories.add(token, draft, written, at)

        return written, acknowledged

    def _keep_partial(self, bracket: Bracket, error: BaseException) -> None:
        """Put what the client has seen of a reply that broke off on the log, in place of a bare failure."""
        if not self._live or not self._answer.sampled or isinstance(error, EngineBroken) or self._facts is None:
            return
        try:
            reply = self._answer.reply(partial=True)
        except EngineBroken:
            return
        record = captured(
            self._facts,
            reply,
            before=self._before,
            after=None,
            first_token_ms=self._first_token_ms,
            ended_ms=self._deps.clock.now_ms(),
            complete=False,
        )
        bracket.capture_soon(*self._against_earlier(bracket, record))
