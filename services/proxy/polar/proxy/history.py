"""What this replica captured and the log acknowledged, per session and attempt: what prompts are written against, and
what they go on from.

Promises: a prompt refers only to completions of its own attempt that stood on the log, in its own partition, below its
call's `CallStarted` (a builder that counts the call then counts its base, wherever the session's close falls between);
memory is bounded, and what is forgotten costs bytes on the log, never correctness; what is over is freed. It does not
know HTTP or Kafka's clients.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field

from polar.schemas import CompletionCaptured, Prompt, RecordRef
from polar.schemas.prompts import Captured, Draft, delta
from polar.service.clock import Clock
from polar.service.tokens import SessionToken

from .metrics import Metrics
from .token_in.conversation import Conversation
from .token_in.turns import Found, Kind, Marks, Turns

PURGE_EVERY_S = 30.0
Key = tuple[str, int]
"""Session and attempt."""


@dataclass(slots=True)
class _Attempt:
    partition: int
    until_ms: int
    """When its token dies."""
    captured: list[Captured] = field(default_factory=list)
    """By offset."""
    turns: Turns = field(default_factory=Turns)
    size: int = 0


class Histories:
    """The attempts that called last, as far as memory goes.

    `attempt_bytes`: of one attempt; where it grows beyond, it begins anew with a whole prompt. `attempts`,
    `total_bytes`: of all together; beyond, the one that was quiet longest is forgotten.
    """

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        *,
        attempt_bytes: int,
        attempts: int,
        total_bytes: int,
        deltas: bool = True,
    ) -> None:
        self.deltas = deltas
        """Whether prompts are written as drafted; else they are written whole, and drafts save memory only."""
        self._clock = clock
        self._metrics = metrics
        self._attempt_bytes = attempt_bytes
        self._most = attempts
        self._total_bytes = total_bytes
        self._attempts: OrderedDict[Key, _Attempt] = OrderedDict()
        self._size = 0
        self._purged = clock.monotonic()

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._size

    def draft(self, token: SessionToken, started: RecordRef, prompt: Prompt) -> Draft:
        """How the whole `prompt` of the call that began at `started` is to be written."""
        key = (token.session_id, token.attempt)
        attempt = self._attempts.get(key)
        history: list[Captured] = []
        if attempt is not None and attempt.partition == started.partition:
            self._attempts.move_to_end(key)
            history = [one for one in attempt.captured if one.offset < started.offset]
        draft = delta(prompt, history)
        self._metrics.prompts.labels("delta" if self.deltas and draft.prompt.base is not None else "whole").inc()
        self._metrics.prompt_bytes_saved.inc(draft.saved if self.deltas else 0)
        return draft

    def find(self, token: SessionToken, conversation: Conversation) -> tuple[Found | None, Kind | None]:
        """The call that `conversation` goes on from, and how it stands to the attempt's calls, as far as remembered."""
        attempt = self._attempts.get((token.session_id, token.attempt))
        turns = Turns() if attempt is None else attempt.turns
        found = turns.find(conversation)
        return found, turns.kind(conversation, found)

    def add(
        self,
        token: SessionToken,
        draft: Draft,
        record: CompletionCaptured,
        at: RecordRef,
        marks: Marks | None = None,
    ) -> None:
        """The log has acknowledged `record`, whose prompt is the draft's, at `at`; `marks`: for `find`."""
        captured = draft.captured(record.completion_id, at.offset, record.choices)
        if self._clock.monotonic() - self._purged > PURGE_EVERY_S:
            self.purge()
        key = (token.session_id, token.attempt)
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.partition != at.partition:
            self._forget(key)
            attempt = None
        if captured.base is not None and (attempt is None or captured.base not in attempt.captured):
            return  # its base was forgotten meanwhile: holding on to it would hide memory from the bounds
        if captured.size + (attempt.size if attempt is not None else 0) > self._attempt_bytes:
            self._forget(key)
            return
        if attempt is None:
            attempt = self._attempts[key] = _Attempt(at.partition, token.not_after_ms)
        insort(attempt.captured, captured, key=lambda one: one.offset)  # one acknowledgement may overtake another
        attempt.until_ms = max(attempt.until_ms, token.not_after_ms)
        size = captured.size
        if marks is not None:
            size += attempt.turns.add(marks, captured, record, draft.length)
        attempt.size += size
        self._attempts.move_to_end(key)
        self._count(size)
        while len(self._attempts) > self._most or self._size > self._total_bytes:
            self._forget(next(iter(self._attempts)))

    def close(self, session_id: str, attempt: int) -> None:
        """Forget the attempts of a session up to `attempt`, which are over."""
        for number in range(attempt + 1):
            self._forget((session_id, number))

    def purge(self) -> None:
        """Forget the attempts whose tokens are dead."""
        now = self._clock.now_ms()
        self._purged = self._clock.monotonic()
        for key in [key for key, one in self._attempts.items() if one.until_ms <= now]:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._count(-attempt.size)

    def _count(self, change: int) -> None:
        self._size += change
        self._metrics.history_bytes.set(self._size)
