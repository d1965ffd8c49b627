"""Clients that come back: calls that go on without their client, and requests that join them (`on_disconnect: finish`).

Promises:

- A call of `finish` is a task of this module's, so that no connection's end ends it; it holds its slot until its end is
  on the log, so that draining waits for it, and `stop` ends what is left.
- Who may join is `joining`'s. Who joins is told the same reply of the same completion, and nothing that closes before
  the broker's acknowledgement, as the first client would have been.
- With `abort`, the default, a call is its handler's and ends with it.
- In both, a new call with the body of one whose client did not get all of its reply says so (`retry_of`).

It knows what a connection is told (`telling`) and neither engines nor the log.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from polar.schemas import ClientHints
from polar.service.clock import Clock
from polar.service.tokens import SessionToken

from .audience import Outcome, Work
from .calls import Call, Delta, Reply
from .dialects import Dialect, StreamEncoder, Told
from .errors import Overloaded, ProxyError, as_told
from .joining import Key, Phase, Unanswered
from .metrics import Metrics
from .settings import ProxySettings
from .telling import Client, tell
from .transcript import Transcript

ENTRY_BYTES = 250
"""Of a log-probability entry, and of each of its alternatives, about."""


def resend_key(token: SessionToken, dialect: str, path: str, said: ClientHints, body_sha256: str) -> Key:
    """What a request has in common with one that is sent again."""
    client = (said.user_agent, said.session, said.thread, said.subagent, said.parent)
    return Key(token.session_id, token.attempt, dialect, path, client, body_sha256)


class Run:
    """A call in a task of its own; one client at a time hears of it, and there may be none."""

    def __init__(self, work: Work, settled: Callable[[], None]) -> None:
        self.told: Told = work.told
        self._work: Work | None = work
        self._settled = settled
        self._transcript = Transcript(work.choices)
        self._tokens: int | None = None
        self._client: Client | None = None
        self._news = asyncio.Event()
        self._end: Outcome | Exception | None = None

    # the call's side: an `Audience` ----------------------------------------------------------------------------------

    def answered(self) -> bool:
        return self._client is not None and self._client.answered()

    def status(self, error: ProxyError) -> int | None:
        return None if self._client is None else self._client.status(error)

    def prompt(self, tokens: int) -> None:
        self._tokens = tokens

    async def tell(self, deltas: Sequence[Delta]) -> None:
        self._transcript.add(deltas)
        self._news.set()

    async def make(self) -> Reply | None:
        """Make the call; None: it failed, which its client hears."""
        work = self._work
        assert work is not None
        try:
            outcome = await work.made(self, self._settled)
        except asyncio.CancelledError:
            self._over(Overloaded("The proxy is stopping; another replica takes calls."))
            raise
        except Exception as error:  # noqa: BLE001 - it is the client's to hear, whoever that is by now
            self._over(error if self._client is not None else as_told(error))
            return None
        self._over(outcome)
        return outcome.reply

    def _over(self, end: Outcome | Exception) -> None:
        self._end = end
        self._work = None  # and with it the conversation
        self._compact()
        self._news.set()

    def _compact(self) -> None:
        """Once nobody is in the midst of it, the reply is all there is to tell."""
        if self._client is None and isinstance(self._end, Outcome):
            reply = self._end.reply
            self._transcript = Transcript(len(reply.choices))
            self._end = Outcome(reply, reply.deltas())

    # the client's side -----------------------------------------------------------------------------------------------

    @property
    def attended(self) -> bool:
        """Whether a client hears of it."""
        return self._client is not None

    async def before_early(self, encoder: StreamEncoder) -> bool:
        """As `Work.before_early`."""
        return self._work is None or await self._work.before_early(encoder)

    async def hear(self, client: Client) -> Outcome:
        """Tell `client` all there is from the beginning and then what comes, as it comes.

        Raises:
            ProxyError: the call failed.
            ClientGone: the client left; the call goes on.
        """
        self._client = client
        reader = self._transcript.reader()
        while True:
            self._news.clear()
            end = self._end
            if self._tokens is not None:
                client.prompt(self._tokens)
            if deltas := reader.read():
                await client.tell(deltas)
            if end is not None:
                break
            await self._news.wait()
        if isinstance(end, Exception):
            raise end
        return end

    def leave(self) -> None:
        """The client is told, or gone."""
        self._client = None
        self._compact()


class Resends:
    """Answers requests with calls, new ones or earlier ones. Owns the tasks of `finish`; `stop` ends them."""

    def __init__(self, settings: ProxySettings, clock: Clock, metrics: Metrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._finish = settings.on_disconnect == "finish"
        self._unanswered: Unanswered[Run] = Unanswered(
            window=settings.resend_window,
            calls=settings.resend_calls,
            attempt_bytes=settings.resend_session_bytes,
            total_bytes=settings.resend_bytes,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Calls of `finish` that run."""
        return len(self._tasks)

    @property
    def kept(self) -> int:
        """Bytes of finished replies that wait for their clients, about."""
        return self._unanswered.size

    def __len__(self) -> int:
        """Calls whose clients have left."""
        return len(self._unanswered)

    def join(self, key: Key) -> Run | None:
        """The earlier call that a request joins. It is the caller's to answer now (`answer_again`)."""
        joined = self._unanswered.join(key, self._clock.monotonic())
        self._held()
        if joined is None:
            return None
        self._metrics.joins.labels("captured" if joined.phase is Phase.CAPTURED else "running").inc()
        return joined.call

    def retried(self, key: Key) -> str | None:
        """The completion id of the call that a new one takes the place of."""
        found = self._unanswered.retried(key, self._clock.monotonic())
        if found is not None:
            self._metrics.retries.inc()
        return found

    async def answer(
        self, work: Work, request: web.Request, dialect: Dialect, call: Call, key: Key, settled: Callable[[], None]
    ) -> web.StreamResponse:
        """Make a call and tell it to the client; `settled` is called when nothing of it is left to write to the log.

        Raises:
            ProxyError: what the client is to be told, while it has no status yet.
        """
        if self._finish:
            run = Run(work, settled)
            self._unanswered.begin(work.told.completion_id, key, run)
            self._start(run, settled)
            return await self.answer_again(run, request, dialect, call)
        self._unanswered.begin(work.told.completion_id, key)
        begun = False

        async def hear(client: Client) -> Outcome:
            nonlocal begun
            begun = True
            return await work.made(client, settled)

        try:
            with self._client_of(work.told.completion_id) as has_all:
                return await self._tell(request, dialect, call, work.told, hear, has_all, work.before_early)
        finally:
            if not begun:
                settled()

    async def answer_again(self, run: Run, request: web.Request, dialect: Dialect, call: Call) -> web.StreamResponse:
        """Tell a client of a call that may have begun before it came. Raises as `answer`."""
        with self._client_of(run.told.completion_id) as has_all:
            try:
                return await self._tell(request, dialect, call, run.told, run.hear, has_all, run.before_early)
            finally:
                run.leave()

    def close(self, session_id: str, attempt: int) -> None:
        """Forget the attempts of a session up to `attempt`, which are over; `Sessions` stops what runs of them."""
        self._unanswered.close(session_id, attempt)
        self._held()

    async def stop(self) -> None:
        """Break off what still runs, as if its clients had left with `abort`; its ends are the recorder's to write."""
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(
        self,
        request: web.Request,
        dialect: Dialect,
        call: Call,
        told: Told,
        hear: Callable[[Client], Awaitable[Outcome]],
        has_all: Callable[[], None],
        before_early: Callable[[StreamEncoder], Awaitable[bool]],
    ) -> web.StreamResponse:
        return await tell(
            request,
            dialect,
            call,
            told,
            hear=hear,
            has_all=has_all,
            before_early=before_early,
            settings=self._settings,
            clock=self._clock,
        )

    def _start(self, run: Run, settled: Callable[[], None]) -> None:
        begun = False

        async def make() -> None:
            nonlocal begun
            begun = True
            completion_id, reply = run.told.completion_id, None
            try:
                reply = await run.make()
            finally:
                if reply is None:
                    self._unanswered.lost(completion_id)
                else:
                    self._unanswered.captured(completion_id, weight(reply), self._clock.monotonic())
                self._held()
                if not run.attended:
                    self._metrics.orphans.labels("failed" if reply is None else "captured").inc()

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not begun:
                settled()  # cancelled before its first step

        task = asyncio.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(done)

    @contextmanager
    def _client_of(self, completion_id: str) -> Iterator[Callable[[], None]]:
        """A client is on the line, to be told when it has all of its reply."""
        try:
            yield lambda: self._unanswered.told(completion_id)
        finally:
            if not self._finish:
                self._unanswered.lost(completion_id)  # with its handler
            self._unanswered.left(completion_id, self._clock.monotonic())
            self._held()

    def _held(self) -> None:
        """Say what is held; and let go of it in time, though nobody asks any more."""
        self._metrics.resend_bytes.set(self._unanswered.size)
        if self._unanswered and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._settings.resend_window + 1.0, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        self._unanswered.expire(self._clock.monotonic())
        self._held()


def weight(reply: Reply) -> int:
    """Bytes of memory that a reply takes, about."""
    size = len(reply.prompt_ids) * 4
    for choice in reply.choices:
        size += len(choice.ids) * 8
        size += sum(ENTRY_BYTES * (1 + len(entry.top_logprobs or ())) for entry in choice.entries)
        message = choice.message
        texts = [message.get("content"), message.get("reasoning")]
        for call in message.get("tool_calls", ()):
            texts += [call["id"], call["function"]["name"], call["function"]["arguments"]]
        size += sum(sys.getsizeof(text) for text in texts if text is not None)
    return size
