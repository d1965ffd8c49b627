"""Whatever a harness does, a build is true to what the engine did.

Random harnesses (append, retry, twin, rewrite, rewind, compact, drop a reply, change tools, sub-agents beside, cut and
failed calls, lost attempts) write a session over the toy tokenizer, with the truth kept beside.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.builder import Entry, rebuild, summarize
from polar.builder.session import SessionState
from polar.schemas import BuilderSpec, Context, SessionOpened, Trajectory, encode
from polar.schemas.prompts import MAX_CHAIN
from tests.builder.toy import END, Message, Reply, Session, Truth, decode, say, system, tool, user

ACTIONS = [
    "append", "append", "append", "append", "retry", "twin", "rewrite", "rewind", "compact", "drop_reply", "tools",
    "switch", "switch", "fresh", "cut", "fail", "hang", "stop", "call",
]  # fmt: skip

actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.text(alphabet="abcd ", min_size=1, max_size=8), st.booleans()),
    min_size=1,
    max_size=25,
)


class Harness:
    """Drives a session by actions. Several conversations go on side by side."""

    def __init__(self, seed: int, builder: BuilderSpec, delta: bool) -> None:
        self.session = Session(seed=seed, builder=builder, delta=delta)
        self.chance = self.session.chance
        self.conversations: list[list[Message]] = [[system("abc"), user("ab")]]
        self.tools = [""]
        self.at = 0
        self.hanging: list[str] = []

    @property
    def now(self) -> list[Message]:
        return self.conversations[self.at]

    def say(self, text: str, exact: bool) -> Reply:
        return say(text, self.chance, exact=exact)

    def send(self, *replies: Reply) -> None:
        self.session.call(self.now, *replies, tools=self.tools[self.at])

    def go_on(self, reply: Reply, text: str) -> None:
        answer = tool(text) if self.chance.random() < 0.5 else user(text)
        self.conversations[self.at] = [*self.now, reply.message, answer]

    def act(self, action: str, text: str, exact: bool) -> None:
        chance = self.chance
        match action:
            case "append" | "call":
                reply = self.say(text, exact)
                self.send(reply)
                if action == "append":
                    self.go_on(reply, text[::-1])
            case "cut":
                reply = say(text, chance, cut=True, exact=exact)
                self.send(reply)
                self.go_on(reply, text)
            case "stop":
                spelled = self.say(text + "gh", exact).ids[:-1]
                reply = Reply(spelled, {"role": "assistant", "content": text}, "stop", "gh")
                self.send(reply)
                self.go_on(reply, text)
            case "retry":
                lost, kept = self.say(text, exact), self.say(text[::-1], exact)
                self.send(lost)
                self.send(kept)
                self.go_on(chance.choice([lost, kept]), text)
            case "twin":
                replies = [self.say(text, exact), self.say(text, exact), self.say(text[::-1], exact)]
                self.send(*replies)
                self.go_on(chance.choice(replies), text)
            case "rewrite":
                said = [i for i, one in enumerate(self.now) if one["role"] == "assistant"]
                if said:
                    at = chance.choice(said)
                    changed = [*self.now]
                    changed[at] = {"role": "assistant", "content": text}
                    self.conversations[self.at] = changed
            case "rewind":
                said = [i for i, one in enumerate(self.now) if one["role"] == "assistant"]
                if said:
                    self.conversations[self.at] = [*self.now[: chance.choice(said)], user(text)]
            case "compact":
                self.conversations[self.at] = [self.now[0], user("a" + text)]
            case "drop_reply":
                self.send(self.say(text, exact))
                self.conversations[self.at] = [*self.now, user(text)]
            case "tools":
                self.tools[self.at] = text
            case "switch":
                self.at = chance.randrange(len(self.conversations))
            case "fresh":
                self.conversations.append([system("d" + text), user(text)])
                self.tools.append("")
                self.at = len(self.conversations) - 1
            case "fail":
                self.session.fail(self.session.start())
            case "hang":
                self.hanging.append(self.session.start())


def play(
    seed: int,
    script: list[tuple[str, str, bool]],
    builder: BuilderSpec,
    delta: bool,
    fence: bool,
    max_chain: int = MAX_CHAIN,
) -> Session:
    harness = Harness(seed, builder, delta)
    harness.session.max_chain = max_chain
    for number, (action, text, exact) in enumerate(script):
        if fence and number == len(script) // 2:
            harness.session.fence()
            harness.hanging.clear()
        harness.act(action, text, exact)
    harness.session.close()
    for name in harness.hanging[::2]:
        harness.session.capture(name, harness.now, harness.say("ab", False), tools=harness.tools[harness.at])
    harness.session.final()
    return harness.session


def check(session: Session, trajectory: Trajectory) -> None:
    """Everything the design promises of a trajectory."""
    assert trajectory.error is None, trajectory.error
    truth = {(one.completion_id, one.choice): one for one in session.truth}
    seen: Counter[tuple[str, int]] = Counter()
    for trace in trajectory.traces:
        view = trajectory.view(trace)
        ids = np.concatenate([view.prompt_ids, view.response_ids])
        mask = np.zeros(len(ids), np.uint8)
        for turn in trace.turns:
            true = _true_of(truth, turn.completion_id, ids[turn.start : turn.end].tolist(), view, trace, turn)
            seen[true.completion_id, true.choice] += 1
            before = ids[: turn.start].tolist()
            if turn.context is Context.EXACT:
                assert before == true.prompt
            else:
                assert _shown(decode(before)) == _shown(decode(true.prompt))
            assert [one.version for one in turn.policy] == [true.version]
            mask[turn.start : turn.end] = 1
        assert view.loss_mask.tolist() == (mask[trace.prompt_length :] * trace.trainable).tolist()
        assert trace.turns[0].start == trace.prompt_length
        assert not view.response_logprobs[mask[trace.prompt_length :] == 0].any()
    assert all(count == 1 for count in seen.values()), "a sampled reply is trained twice"
    in_traces = {name for name, _ in seen}
    aside = {one.completion_id for one in trajectory.set_aside}
    assert in_traces | aside == set(session.started)
    assert not in_traces & aside or trajectory.builder.config.get("siblings") == "set_aside"
    own = {name for name, true in truth.items() if true.attempt == trajectory.attempt and name[0] in in_traces}
    if not trajectory.builder.config:
        assert set(seen) == own


def _shown(text: str) -> str:
    """Without stop strings, which the engine sampled and no later prompt shows."""
    return text.replace(f"gh<{END}>", f"<{END}>")


def _true_of(truth: dict[tuple[str, int], Truth], name: str, ids: list[int], view, trace, turn) -> Truth:  # type: ignore[no-untyped-def]
    """The choice a turn shows: same ids, in order, and its own log-probabilities."""
    start = turn.start - trace.prompt_length
    logprobs = view.response_logprobs[start : start + len(ids)].tolist()
    for (completion, _), one in truth.items():
        if completion == name and one.ids == ids and one.logprobs == logprobs:
            return one
    raise AssertionError(f"{name} never sampled what its turn shows")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**16),
    script=actions,
    config=st.sampled_from([{}, {}, {}, {"on_drift": "break"}, {"siblings": "set_aside"}]),
    delta=st.booleans(),
    fence=st.booleans(),
)
def test_merged_traces_hold_what_the_engine_did(
    seed: int, script: list[tuple[str, str, bool]], config: dict[str, str], delta: bool, fence: bool
) -> None:
    session = play(seed, script, BuilderSpec(config=dict(config)), delta, fence)
    trajectory = rebuild(session.records)
    check(session, trajectory)
    assert encode(rebuild(session.records)) == encode(trajectory)
    if config.get("on_drift") == "break":
        assert all(turn.context is Context.EXACT for trace in trajectory.traces for turn in trace.turns)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**16), script=actions, delta=st.booleans(), fence=st.booleans())
def test_per_request_is_exact_and_shares_its_prompts(
    seed: int, script: list[tuple[str, str, bool]], delta: bool, fence: bool
) -> None:
    session = play(seed, script, BuilderSpec(strategy="per_request"), delta, fence)
    trajectory = rebuild(session.records)
    check(session, trajectory)
    assert all(turn.context is Context.EXACT for trace in trajectory.traces for turn in trace.turns)
    own = [one for one in session.truth if one.attempt == trajectory.attempt]
    tree = {tuple(one.prompt[:end]) for one in own for end in range(1, len(one.prompt) + 1)}
    assert len(trajectory.pool.tokens) <= len(tree) + sum(len(one.ids) for one in own)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**16),
    script=actions,
    strategy=st.sampled_from(["prefix_merging", "per_request", "prefix_tree"]),
    fence=st.booleans(),
    max_chain=st.sampled_from([1, 3, MAX_CHAIN]),
)
def test_delta_prompts_and_whole_ones_give_the_same_trajectory(
    seed: int, script: list[tuple[str, str, bool]], strategy: str, fence: bool, max_chain: int
) -> None:
    builder = BuilderSpec(strategy=strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polar.schemas.prompts.REFERENCE_BYTES", 1)  # these prompts are short
        against = play(seed, script, builder, True, fence, max_chain)
    whole = play(seed, script, builder, False, fence)
    assert encode(rebuild(against.records)) == encode(rebuild(whole.records))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**16), script=actions, again=st.integers(0, 2**16), fence=st.booleans())
def test_repeated_records_change_nothing(
    seed: int, script: list[tuple[str, str, bool]], again: int, fence: bool
) -> None:
    session = play(seed, script, BuilderSpec(), False, fence)
    chance = random.Random(again)
    doubled: list[Entry] = []
    for entry in session.records:
        doubled.append(entry)
        if not isinstance(entry.event, SessionOpened) and chance.random() < 0.3:
            doubled.append(chance.choice(doubled))
    whole, once = rebuild(doubled), rebuild(session.records)
    assert encode(whole) == encode(once)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**16), script=actions, fence=st.booleans())
def test_the_summary_counts_what_the_trajectory_holds(
    seed: int, script: list[tuple[str, str, bool]], fence: bool
) -> None:
    session = play(seed, script, BuilderSpec(), False, fence)
    trajectory = rebuild(session.records)
    opened = session.records[0]
    assert isinstance(opened.event, SessionOpened)
    state = SessionState(opened.ref, opened.event)
    for entry in session.records[1:]:
        if state.closing is None:
            state.observe(entry)
    summary = summarize(trajectory, state.account())
    assert summary.trained_tokens == sum(int(trajectory.view(one).loss_mask.sum()) for one in trajectory.traces)
    own = {call.completion_id for call in state.account().own()}
    traced = {turn.completion_id for trace in trajectory.traces for turn in trace.turns}
    assert summary.captured + summary.failed + summary.set_aside.get("unfinished", 0) == len(own)
    assert len(traced) + sum(summary.set_aside.values()) == len(session.started)
