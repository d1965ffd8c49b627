"""Who may call: session tokens, and what `polar.control` says of their sessions.

Promises: a forged, expired, closed or fenced key admits nothing, in the words that a harness's provider would use; a
call that runs while its session ends is stopped; what is remembered of sessions is bounded and forgotten when their
tokens are dead. It does not know HTTP or Kafka's clients: `apply` is fed with the records of `polar.control`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from polar.schemas import ControlState, SessionControl
from polar.service.clock import Clock
from polar.service.tokens import SessionToken, TokenInvalid, verify_session

from .errors import AttemptFenced, KeyRefused, Overloaded, ProxyError

PURGE_EVERY_S = 30.0
REASONS = {
    "expired": "The session key has expired: its session is over.",
    "forged": "The session key is not signed by this installation.",
    "malformed": "The session key is not one of Polar's. Use the key that the gateway put into the environment.",
}


class Sessions:
    """The sessions that this replica has seen.

    `memory_ms`: the longest life of a token; so long counts a record of `polar.control` that does not say how long.
    `limit`: how many sessions are remembered; beyond it calls of new sessions are refused, since forgetting could let a
    closed one in.
    """

    def __init__(self, secret: str, clock: Clock, *, limit: int, memory_ms: int) -> None:
        self._secret = secret
        self._clock = clock
        self._limit = limit
        self._memory_ms = memory_ms
        self._control: dict[str, SessionControl] = {}
        self._calls: dict[tuple[str, int], tuple[int, int]] = {}
        """Per attempt: the next call's number, and when its token dies."""
        self._running: dict[str, set[_Running]] = {}
        self._purged = clock.monotonic()

    def __len__(self) -> int:
        return len(self._control) + len(self._calls)

    def admit(self, key: str | None) -> SessionToken:
        """The token of a key that may call now.

        Raises:
            KeyRefused: none, forged, expired, or its session is closed.
            AttemptFenced: the attempt is over.
        """
        if not key:
            raise KeyRefused("No session key. Send it as `Authorization: Bearer`, as `x-api-key` or as /s/<key>/v1.")
        try:
            token = verify_session(key, self._secret, self._clock.now_ms())
        except TokenInvalid as error:
            raise KeyRefused(REASONS.get(error.reason, REASONS["malformed"])) from None
        refusal = _refusal(token, self._control.get(token.session_id))
        if refusal is not None:
            raise refusal
        return token

    def over(self, token: SessionToken) -> bool:
        """Whether the token's session has ended, or its attempt."""
        return _refusal(token, self._control.get(token.session_id)) is not None

    def next_call(self, token: SessionToken, at_least: int = 0) -> int:
        """The number of the attempt's next call, from 0.

        `at_least`: how many calls its request shows to have gone before, so that a replica that has just started, or
        that takes turns with another one, does not count them again.

        Raises:
            Overloaded: too many sessions are remembered.
        """
        key = (token.session_id, token.attempt)
        known = self._calls.get(key)
        number = max(at_least, 0 if known is None else known[0])
        if known is None and len(self) >= self._limit:
            self.purge()
            if len(self) >= self._limit:
                raise Overloaded(
                    "The proxy remembers as many sessions as it may; raise POLAR_PROXY_MAX_SESSIONS.", retry_after=30
                )
        self._calls[key] = (number + 1, token.not_after_ms)
        return number

    @contextmanager
    def running(self, token: SessionToken) -> Iterator[None]:
        """Stops the body, as `KeyRefused` or `AttemptFenced`, when the session ends or the attempt is fenced."""
        refusal = _refusal(token, self._control.get(token.session_id))
        if refusal is not None:
            raise refusal  # it ended since it was admitted
        task = asyncio.current_task()
        assert task is not None
        run = _Running(token, task)
        self._running.setdefault(token.session_id, set()).add(run)
        try:
            yield
        except asyncio.CancelledError:
            if run.refusal is None or task.uncancel() > 0:
                raise  # the client left, perhaps besides
            raise run.refusal from None
        finally:
            runs = self._running[token.session_id]
            runs.discard(run)
            if not runs:
                del self._running[token.session_id]

    def apply(self, session_id: str, control: SessionControl | None) -> None:
        """Take a record of `polar.control`; None: a tombstone."""
        if control is None:
            self._control.pop(session_id, None)
        elif self._counts(control):
            self._control[session_id] = control
            for run in list(self._running.get(session_id, ())):
                run.stop(_refusal(run.token, control))
        if self._clock.monotonic() - self._purged > PURGE_EVERY_S:
            self.purge()

    def control(self, session_id: str) -> SessionControl | None:
        """What was last heard of a session."""
        return self._control.get(session_id)

    def purge(self) -> None:
        """Forget sessions whose tokens are dead."""
        now = self._clock.now_ms()
        self._purged = self._clock.monotonic()
        self._control = {key: one for key, one in self._control.items() if self._counts(one)}
        self._calls = {key: one for key, one in self._calls.items() if one[1] > now}

    def _counts(self, control: SessionControl) -> bool:
        until = control.at_ms + self._memory_ms if control.until_ms is None else control.until_ms
        return until > self._clock.now_ms()


class _Running:
    """A call that runs."""

    def __init__(self, token: SessionToken, task: asyncio.Task[object]) -> None:
        self.token = token
        self.refusal: ProxyError | None = None
        self._task = task

    def stop(self, refusal: ProxyError | None) -> None:
        if refusal is not None and self.refusal is None:
            self.refusal = refusal
            self._task.cancel()


def _refusal(token: SessionToken, control: SessionControl | None) -> ProxyError | None:
    if control is None:
        return None
    if control.state is ControlState.FENCED:
        if token.attempt > control.attempt:
            return None
        return AttemptFenced("This attempt of the session is over; another one follows. Stop.")
    return KeyRefused("The session is closed. Stop.")
