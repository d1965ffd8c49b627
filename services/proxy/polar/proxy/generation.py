"""One call under way: bracket, engine, capture, in that order.

What may be told, and when, is decided here and nowhere else: text as it comes (live), and nothing that closes before
the broker's word. Live and synthetic differ in one step, how the engine is asked. It does not know who listens
(`telling`), nor whether somebody still does (`resends`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from polar.schemas import CallStarted, ClientHints, CompletionCaptured, RecordRef, Sampling
from polar.service.clock import Clock
from polar.service.randomness import Randomness
from polar.service.tokens import SessionToken

from . import spelling
from .answer import Answer
from .audience import Audience, Outcome
from .calls import Call, Reply
from .capture import Acknowledged, Bracket, Recorder
from .dialects import Told
from .early import Prompted, Stop, count_first, measured
from .engine import Count, Endpoint
from .errors import EngineAway, EngineBroken, EngineError, ModelUnknown, PromptTooLong, ProxyError
from .gate import Gate
from .history import Histories
from .metrics import Metrics
from .placing import fold_late_system, has_late_system
from .record import Facts, captured, reply_room
from .resends import Resends
from .sampling import engine_fields
from .selftest import check_mode
from .sessions import Sessions
from .settings import ProxySettings
from .token_in.continuing import Context, Continuing
from .upstreams.engines import Engines
from .upstreams.place import Place
from .upstreams.word import Word

CUT = ("abort", "error")
"""Finish reasons of a reply that the engine did not let end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """What generations share."""

    settings: ProxySettings
    sessions: Sessions
    recorder: Recorder
    engines: Engines
    histories: Histories
    continuing: Continuing
    resends: Resends
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
        token: SessionToken,
        call: Call,
        sampling: Sampling,
        endpoint: Endpoint,
        started: CallStarted,
        *,
        request_sha256: str,
        said: ClientHints,
        retry_of: str | None = None,
    ) -> None:
        self.told = Told(started.completion_id, started.at_ms // 1000, call.model)
        self.choices = call.n
        self._deps = deps
        self._token = token
        self._call = call
        self._unbounded = sampling
        self._endpoint = endpoint
        self._place: Place | None = None
        self._word: Word | None = None
        self._started = started
        self._request_sha256 = request_sha256
        self._said = said
        self._retry_of = retry_of
        self._bound(endpoint.max_model_len)
        self._answer = Answer(call.n, keep_entries=call.logprobs)
        self._gate = Gate(call.n)
        self._stop = Stop()
        self._facts: Facts | None = None
        self._context: Context | None = None
        self._before: str | None = None
        self._first_token_ms: int | None = None

    async def before_early(self, encoder: Prompted) -> bool:
        """Whether headers may go out that an error then cannot have: `early.count_first`."""
        return bool(self._call.media) or await count_first(self._count, encoder, self._stop)

    async def _count(self) -> Count:
        """The prompt's length at the engine that the call is at, or waits for."""
        endpoint = self._endpoint if self._place is None else self._place.endpoint
        return await endpoint.count(await placed(self._call, endpoint, self._deps.settings.late_system))

    def _bound(self, max_model_len: int | None) -> None:
        """Have the reply fit a record; an engine's length bounds it too."""
        call, limit, most = self._call, self._deps.max_record_bytes, self._unbounded.max_tokens
        room = reply_room(call, max_model_len=max_model_len, max_tokens=most, limit=limit)
        self._sampling = replace(self._unbounded, max_tokens=room)
        self._bounded_for = max_model_len

    async def made(self, audience: Audience, settled: Callable[[], None]) -> Outcome:
        """Generate and capture; `settled` is called when nothing of the call is left to write to the log.

        Raises:
            ProxyError: what the client is to be told instead of a reply.
        """
        try:
            place = self._deps.engines.place(self._token.session_id, self._token.model)
        except BaseException:
            settled()  # nothing has begun
            raise
        place.cut = self._stop
        self._place = place
        word = self._word = Word(place, self._deps.clock)
        recorder, started = self._deps.recorder, self._started
        bracket = Bracket(recorder, started, settled, answered=audience.answered, status=audience.status)
        try:
            with self._counted():
                reply = await self._bracketed(bracket, audience, place)
        finally:
            place.leave()  # whatever is left to write: an engine's seat must not wait for the broker
            await word.close()
        return Outcome(reply, self._gate.rest() if self._live else reply.deltas())

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
            self._deps.metrics.calls.labels(self._call.dialect, outcome).inc()

    async def _bracketed(self, bracket: Bracket, audience: Audience, place: Place) -> Reply:
        """From `CallStarted` to the acknowledged capture: what comes after may close."""
        async with bracket:
            try:
                with self._stop.here(), self._deps.sessions.running(self._token):
                    await self._asked(audience, place)
                reply = self._answer.reply() if self._live else spelling.as_written(self._answer.reply(), self._call)
                after = await self._version_after(reply)
                place.leave()
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
        live = self._call.stream and self._deps.settings.stream_mode == "live"
        exact = self._context is not None and self._context.exact  # such a reply is read when it is whole
        return live and self._endpoint.streams_tokens and not exact

    async def _asked(self, audience: Audience, place: Place) -> None:
        """Ask an engine; another one, or once more after a pause, where it has not begun with the call."""
        while True:
            self._endpoint = await place.seated()
            try:
                return await self._ask(audience)
            except PromptTooLong as error:
                if error.tokens is not None:
                    raise
                raise await measured(error, self._endpoint, self._call) from None
            except (EngineAway, ModelUnknown) as error:
                if not await place.again(error):
                    raise

    async def _ask(self, audience: Audience) -> None:
        """Ask the engine; in live mode, tell the audience what may be told meanwhile."""
        deps, token, endpoint = self._deps, self._token, self._endpoint
        engine = await endpoint.identity()
        check_mode(engine.logprobs_mode, self._sampling.temperature)
        if endpoint.max_model_len != self._bounded_for:
            self._bound(endpoint.max_model_len)  # it was another engine's, or not known yet
        self._call = await placed(self._call, endpoint, deps.settings.late_system)
        self._facts = Facts(
            token=token,
            started=self._started,
            call=self._call,
            sampling=self._sampling,
            engine=engine,
            request_sha256=self._request_sha256,
            hints=self._said,
            image_token=deps.settings.image_token_id,
            retry_of=self._retry_of,
        )
        assert self._word is not None
        self._before = await self._word.said()
        fields = engine_fields(self._sampling)
        body = endpoint.body(self._call, engine.model, fields, tenant=token.tenant, version=self._before)
        left = max((token.not_after_ms - deps.clock.now_ms()) / 1000, 0.001)
        timeout = min(deps.settings.call_timeout, left)
        request_id = self._started.completion_id
        self._context = await deps.continuing.context(
            token, self._call, endpoint, body, request_id=request_id, timeout=timeout
        )
        entries = self._call.logprobs if self._live else spelling.wanted(self._call)
        self._answer = Answer(self._call.n, keep_entries=entries)
        if self._context.exact:
            await self._context.generate(self._answer)
            return
        if not self._live:
            await endpoint.whole(body, self._answer, request_id=request_id, timeout=timeout)
            return
        stream = endpoint.stream(body, self._answer, request_id=request_id, timeout=timeout)
        async with aclosing(stream) as arrivals:
            async for deltas in arrivals:
                if self._first_token_ms is None and self._answer.sampled:
                    self._first_token_ms = deps.clock.now_ms()
                if self._answer.prompt_tokens is not None:
                    audience.prompt(self._answer.prompt_tokens)
                told = [passed for delta in deltas if (passed := self._gate.admit(delta)) is not None]
                if told:
                    await audience.tell(told)

    async def _version_after(self, reply: Reply) -> str | None:
        """The engine's word on its weights after the call, where its answer does not tell."""
        told = [choice.versions[-1].version for choice in reply.choices if choice.versions]
        if told:
            self._endpoint.version = told[-1]
        if self._before is None or len(told) == len(reply.choices):
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
        assert self._context is not None
        record, marks = self._deps.continuing.measured(self._context, record), self._context.marks()
        draft = histories.draft(token, bracket.at, record.prompt)
        written = replace(record, prompt=draft.prompt) if histories.deltas else record

        def acknowledged(at: RecordRef) -> None:
            if not sessions.over(token):
                histories.add(token, draft, written, at, marks)

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
