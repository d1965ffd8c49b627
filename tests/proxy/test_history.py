"""What a replica remembers of the calls it captured: bounded, freed, and never a base that a reader might not have."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from polar.proxy.history import Histories
from polar.proxy.metrics import Metrics
from polar.schemas import Choice, CompletionCaptured, Engine, Logprobs, Prompt, RecordRef, Sampling, TokenIds
from polar.schemas.prompts import Draft
from polar.service.clock import ManualClock
from polar.service.tokens import SessionToken

HISTORY = list(range(1000))


class Replica:
    """A proxy's memory and a log of one partition."""

    def __init__(self, **limits: int) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        values = {"attempt_bytes": 100_000, "attempts": 100, "total_bytes": 1_000_000, **limits}
        self.histories = Histories(self.clock, Metrics(self.registry), **values)
        self.offset = 0

    def token(self, session: str = "s", attempt: int = 1) -> SessionToken:
        return SessionToken(
            session_id=session,
            attempt=attempt,
            task_id="t",
            group_id="g",
            sample=0,
            model="m",
            not_after_ms=self.clock.now_ms() + 60_000,
        )

    def place(self, partition: int = 0) -> RecordRef:
        self.offset += 1
        return RecordRef(topic="completions", partition=partition, offset=self.offset)

    def call(self, token: SessionToken, ids: list[int], *, partition: int = 0) -> Prompt:
        """A call from its start to its acknowledgement; its prompt as written."""
        started = self.place(partition)
        draft = self.histories.draft(token, started, Prompt(ids=TokenIds(ids)))
        self.acknowledge(token, draft, self.place(partition))
        return draft.prompt

    def acknowledge(self, token: SessionToken, draft: Draft, at: RecordRef) -> None:
        self.histories.add(token, draft, _record(f"c{at.offset}", draft.prompt), at)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def _record(name: str, prompt: Prompt) -> CompletionCaptured:
    values: dict[str, Any] = {"task_id": "t", "group_id": "g", "dialect": "d", "request_sha256": ""}
    choice = Choice(ids=TokenIds([7]), logprobs=Logprobs([-1.0]), message={"role": "assistant"}, finish="stop")
    return CompletionCaptured(
        completion_id=name,
        session_id="s",
        attempt=1,
        sample=0,
        call=0,
        started_ms=0,
        ended_ms=0,
        prompt=prompt,
        choices=[choice],
        sampling_asked=Sampling(),
        sampling=Sampling(),
        engine=Engine(model="m", endpoint="e"),
        **values,
    )


def test_a_prompt_refers_to_a_call_acknowledged_before_its_own_began() -> None:
    replica = Replica()
    token = replica.token()
    begun_early = replica.place()
    assert replica.call(token, HISTORY).base is None
    # a session's close may stand between its beginning and the other's: then only the other is late
    draft = replica.histories.draft(token, begun_early, Prompt(ids=TokenIds([*HISTORY, 7, 1])))
    assert draft.prompt.base is None
    assert replica.call(token, [*HISTORY, 7, 1]).base is not None
    assert replica.value("polar_proxy_prompts_total", form="whole") == 2
    assert replica.value("polar_proxy_prompts_total", form="delta") == 1
    assert replica.value("polar_proxy_prompt_bytes_saved_total") == 4 * (len(HISTORY) + 1)


def test_attempts_sessions_and_partitions_know_nothing_of_each_other() -> None:
    replica = Replica()
    assert replica.call(replica.token(), HISTORY).base is None
    assert replica.call(replica.token(attempt=2), HISTORY).base is None
    assert replica.call(replica.token("other"), HISTORY).base is None
    assert replica.call(replica.token(), HISTORY, partition=1).base is None
    assert replica.call(replica.token(), HISTORY, partition=1).base is not None


def test_an_attempt_that_grows_beyond_its_share_begins_anew() -> None:
    replica = Replica(attempt_bytes=12_000)
    token = replica.token()
    written = []
    ids = HISTORY
    for _ in range(6):
        written.append(replica.call(token, ids).base is None)
        ids = [*ids, 7, *range(900)]
    assert written[:3] == [True, False, False]
    assert True in written[3:]
    assert replica.histories.size <= 12_000


def test_an_attempt_whose_prompts_alone_are_beyond_its_share_is_written_whole() -> None:
    replica = Replica(attempt_bytes=1_000)
    assert all(replica.call(replica.token(), HISTORY).base is None for _ in range(3))
    assert replica.histories.size == 0


def test_the_session_that_was_quiet_longest_is_forgotten_first() -> None:
    replica = Replica(attempts=2)
    for session in ("one", "two", "one", "three"):
        replica.call(replica.token(session), HISTORY)
    assert replica.call(replica.token("one"), HISTORY).base is not None
    assert replica.call(replica.token("two"), HISTORY).base is None
    assert len(replica.histories) == 2


def test_all_sessions_together_stay_below_their_bound() -> None:
    replica = Replica(total_bytes=20_000)
    for number in range(50):
        replica.call(replica.token(f"s{number}"), HISTORY)
        assert replica.histories.size <= 20_000
        assert replica.value("polar_proxy_history_bytes") == replica.histories.size
    assert 1 <= len(replica.histories) <= 4


async def test_what_is_over_is_freed() -> None:
    replica = Replica()
    for attempt in (1, 2, 3):
        replica.call(replica.token(attempt=attempt), HISTORY)
    replica.call(replica.token("other"), HISTORY)
    replica.histories.close("s", 2)
    assert replica.call(replica.token(attempt=1), HISTORY).base is None
    assert replica.call(replica.token(attempt=3), HISTORY).base is not None
    await replica.clock.advance(61)
    replica.histories.purge()
    assert len(replica.histories) == 0
    assert replica.histories.size == 0


def test_a_capture_whose_base_was_forgotten_meanwhile_holds_no_memory() -> None:
    replica = Replica()
    token = replica.token()
    replica.call(token, HISTORY)
    draft = replica.histories.draft(token, replica.place(), Prompt(ids=TokenIds([*HISTORY, 7, 1])))
    assert draft.prompt.base is not None
    replica.histories.close("s", 1)
    replica.acknowledge(token, draft, replica.place())
    assert len(replica.histories) == 0
    assert replica.call(token, [*HISTORY, 7, 1]).base is None


def test_acknowledgements_may_overtake_each_other() -> None:
    replica = Replica()
    token = replica.token()
    replica.call(token, HISTORY)
    one, other = (
        replica.histories.draft(token, replica.place(), Prompt(ids=TokenIds([*HISTORY, 7, *range(length)])))
        for length in (300, 600)
    )
    early, late = replica.place(), replica.place()
    replica.acknowledge(token, other, late)
    replica.acknowledge(token, one, early)
    written = replica.call(token, [*HISTORY, 7, *range(600), 7, 1])
    assert written.base is not None
    assert written.base.offset == late.offset
    assert written.base.ids == len(HISTORY) + 602
