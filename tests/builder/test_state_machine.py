"""Any harness, step by step, under any template: what is built is what the engine did.

A state machine drives conversations side by side (append, fork, retry, twin choices, compact, sub-agent, truncate, stop
string, rewrite, rewind, drop thinking, respell) over the toy tokenizer, with the true record of every generation kept
beside, and builds with every strategy as it goes.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polar.builder import rebuild
from polar.schemas import BuilderSpec, Context, Trajectory, encode
from tests.builder.toy import (
    BEGIN,
    END,
    NEWLINE,
    ROLES,
    Message,
    Reply,
    Session,
    Truth,
    canonical,
    decode,
    render,
    say,
    spelled,
    system,
    tool,
    user,
)

pytestmark = pytest.mark.timeout(900)  # seconds of work, and more on a machine that others use
texts = st.text(alphabet="abcd ", min_size=1, max_size=10)
thoughts = st.sampled_from(["", "", "ab", "cab dad", " ab ", "cab dad "])
THINK, UNTHINK = 8, 9
"""Control ids around a thought."""
SPECS = [
    BuilderSpec(),
    BuilderSpec(config={"on_drift": "break"}),
    BuilderSpec(config={"on_drift": "mask"}),
    BuilderSpec(config={"siblings": "set_aside"}),
    BuilderSpec(config={"max_tokens_per_trace": 60}),
    BuilderSpec(strategy="per_request"),
    BuilderSpec(strategy="prefix_tree"),
]


class Template:
    """A chat template with a habit: what it does with thoughts, and what it opens the reply with."""

    def __init__(self, *, keeps: bool, opens: str) -> None:
        self.keeps = keeps
        self.opens = {"": [], "think": [THINK, NEWLINE], "empty": [THINK, NEWLINE, UNTHINK, NEWLINE]}[opens]

    def body(self, message: Message) -> list[int]:
        thought = message.get("reasoning")
        shown = [THINK, NEWLINE, *canonical(thought), UNTHINK, NEWLINE] if thought and self.keeps else []
        return [*shown, *canonical(message.get("content") or "")]

    def prompt(self, messages: list[Message], tools: str) -> list[int]:
        found = canonical(tools)
        for one in messages:
            found += [BEGIN, ROLES[one["role"]], NEWLINE, *self.body(one), END, NEWLINE]
        return [*found, BEGIN, ROLES["assistant"], NEWLINE, *self.opens]


class Harness(RuleBasedStateMachine):
    """Calls the model in one of its conversations at a time."""

    @initialize(
        seed=st.integers(0, 2**16),
        delta=st.booleans(),
        keeps=st.booleans(),
        opens=st.sampled_from(["", "", "think", "empty"]),
        first=texts,
    )
    def open(self, seed: int, delta: bool, keeps: bool, opens: str, first: str) -> None:
        self.session = Session(seed=seed, delta=delta)
        self.chance = self.session.chance
        self.template = Template(keeps=keeps, opens=opens)
        self.talks: list[list[Message]] = [[system("abc"), user(first)]]
        self.tools = [""]
        self.at = 0
        self.built = 0

    # what a harness does

    @property
    def now(self) -> list[Message]:
        return self.talks[self.at]

    def reply(self, text: str, thought: str, exact: bool) -> Reply:
        """What a policy says: a thought if any (opened by the prompt, or by itself), then the text."""
        spell = canonical if exact else lambda one: spelled(one, self.chance)
        message: Message = {"role": "assistant", "content": text}
        ids = spell(text)
        if thought and self.template.opens != [THINK, NEWLINE, UNTHINK, NEWLINE]:
            message["reasoning"] = thought
            opened = [] if self.template.opens else [THINK, NEWLINE]
            ids = [*opened, *spell(thought), UNTHINK, NEWLINE, *ids]
        return Reply([*ids, END], message)

    def call(self, *replies: Reply) -> None:
        tools = self.tools[self.at]
        self.session.call(self.now, *replies, tools=tools, prompt=self.template.prompt(self.now, tools))

    def answer(self, reply: Reply, text: str, *, result: bool) -> None:
        self.talks[self.at] = [*self.now, reply.message, tool(text) if result else user(text)]

    @rule(text=texts, thought=thoughts, exact=st.booleans(), result=st.booleans())
    def append(self, text: str, thought: str, exact: bool, result: bool) -> None:
        reply = self.reply(text, thought, exact)
        self.call(reply)
        self.answer(reply, text[::-1], result=result)

    @rule(text=texts, exact=st.booleans(), goes_on=st.booleans())
    def truncate(self, text: str, exact: bool, goes_on: bool) -> None:
        reply = say(text, self.chance, cut=True, exact=exact)
        self.call(reply)
        if goes_on:
            self.answer(reply, text, result=False)

    @rule(text=texts, exact=st.booleans())
    def stop_string(self, text: str, exact: bool) -> None:
        whole = say(text + "gh", self.chance, exact=exact).ids[:-1]
        reply = Reply(whole, {"role": "assistant", "content": text}, "stop", "gh")
        self.call(reply)
        self.answer(reply, text, result=True)

    @rule(text=texts, exact=st.booleans(), second=st.booleans())
    def retry(self, text: str, exact: bool, second: bool) -> None:
        replies = [self.reply(text, "", exact), self.reply(text[::-1], "", exact)]
        for one in replies:
            self.call(one)
        self.answer(replies[second], text, result=True)

    @rule(text=texts, chosen=st.integers(0, 2))
    def choices(self, text: str, chosen: int) -> None:
        replies = [self.reply(text, "", True), self.reply(text, "", False), self.reply(text[::-1], "", False)]
        self.call(*replies)
        self.answer(replies[chosen], text, result=False)

    @rule(text=texts)
    def fork(self, text: str) -> None:
        """Another conversation from an earlier turn; the old one may go on."""
        said = [at for at, one in enumerate(self.now) if one["role"] == "assistant"]
        if said:
            self.talks.append([*self.now[: self.chance.choice(said) + 1], user(text)])
            self.tools.append(self.tools[self.at])
            self.at = len(self.talks) - 1

    @rule(text=texts)
    def rewrite(self, text: str) -> None:
        said = [at for at, one in enumerate(self.now) if one["role"] == "assistant"]
        if said:
            changed = [*self.now]
            changed[self.chance.choice(said)] = {"role": "assistant", "content": text}
            self.talks[self.at] = changed

    @rule()
    def drop_thinking(self) -> None:
        """The client sends no thoughts back."""
        kept = [{name: value for name, value in one.items() if name != "reasoning"} for one in self.now]
        self.talks[self.at] = kept

    @rule()
    def trim(self) -> None:
        """The client sends replies back without the white space around them."""
        trims = {"content", "reasoning"}
        self.talks[self.at] = [
            {name: value.strip() if name in trims else value for name, value in one.items()}
            if one["role"] == "assistant"
            else one
            for one in self.now
        ]

    @rule()
    def template_changes_its_mind(self) -> None:
        """As the ones that keep thoughts within a turn and drop them after it."""
        self.template.keeps = not self.template.keeps

    @rule(text=texts)
    def compact(self, text: str) -> None:
        summary = "abcd abcd abcd " + text
        asked = [*self.now, user("d")]
        self.session.call(asked, self.reply(summary, "", True), prompt=self.template.prompt(asked, ""))
        self.talks[self.at] = [self.now[0], user("a " + summary)]

    @rule(text=texts)
    def sub_agent(self, text: str) -> None:
        self.talks.append([system("d" + text), user(text)])
        self.tools.append("a")
        self.at = len(self.talks) - 1

    @rule(number=st.integers(0, 8))
    def switch(self, number: int) -> None:
        self.at = number % len(self.talks)

    @rule(text=texts)
    def tools_change(self, text: str) -> None:
        self.tools[self.at] = text

    @rule()
    def fail(self) -> None:
        self.session.fail(self.session.start())

    # what has to hold

    @invariant()
    @precondition(lambda self: hasattr(self, "session") and len(self.session.truth) >= self.built + 10)
    def holds_on_the_way(self) -> None:
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.check()

    def check(self) -> None:
        self.built = len(self.session.truth)
        records = [*self.session.records]
        self.session.close()
        self.session.final()
        closed = self.session.records
        self.session.records = records
        for spec in SPECS:
            trajectory = rebuild(closed, spec)
            assert encode(rebuild(closed, spec)) == encode(trajectory)
            check(self.session, trajectory)


def check(session: Session, trajectory: Trajectory) -> None:
    """Everything that is promised of a trajectory, against the truth."""
    assert trajectory.error is None, trajectory.error
    config = trajectory.builder.config
    truth: dict[str, list[Truth]] = {}
    for one in session.truth:
        truth.setdefault(one.completion_id, []).append(one)
    seen: Counter[tuple[str, int]] = Counter()
    for number, trace in enumerate(trajectory.traces):
        view = trajectory.view(trace)
        ids = np.concatenate([view.prompt_ids, view.response_ids])
        sampled = np.zeros(len(ids), np.uint8)
        trained = np.zeros(len(ids), np.uint8)
        assert trace.turns[0].start == trace.prompt_length
        assert trace.turns[-1].end == len(ids)
        assert all(before.end <= after.start for before, after in pairwise(trace.turns))
        contexts = [turn.context for turn in trace.turns]
        assert contexts == sorted(contexts, key=lambda one: one is not Context.EXACT), "drift is never forgotten"
        for turn in trace.turns:
            true = _true(
                truth[turn.completion_id], ids, view.response_logprobs, turn.start, turn.end, trace.prompt_length
            )
            seen[true.completion_id, true.choice] += 1
            before = ids[: turn.start].tolist()
            if turn.context is Context.EXACT:
                assert before == true.prompt
            else:
                assert before != true.prompt
                assert _text(before) == _text(true.prompt)
            assert [one.version for one in turn.policy] == [true.version]
            assert turn.end - turn.start == len(true.ids) or trace.cut
            sampled[turn.start : turn.end] = 1
            trained[turn.start : turn.end] = trace.trainable and turn.trainable
        start = trace.prompt_length
        assert view.loss_mask.tolist() == trained[start:].tolist()
        assert not view.response_logprobs[sampled[start:] == 0].any()
        if (limit := config.get("max_tokens_per_trace")) is not None:
            assert len(ids) <= limit
        if trace.shares is not None:
            assert trace.shares.trace < number
            other = trajectory.view(trajectory.traces[trace.shares.trace])
            shared = np.concatenate([other.prompt_ids, other.response_ids])[: trace.shares.length]
            assert shared.tolist() == ids[: trace.shares.length].tolist()
    assert all(count == 1 for count in seen.values()), "a sampled reply is in two traces"
    assert set(seen) | {
        (one.completion_id, true.choice) for one in trajectory.set_aside for true in truth.get(one.completion_id, [])
    } == {(true.completion_id, true.choice) for true in session.truth}
    in_traces = {name for name, _ in seen}
    assert in_traces | {one.completion_id for one in trajectory.set_aside} == set(session.started)
    told = trajectory.statistics()
    assert told.replies == len(seen) == len(trajectory.traces) + sum(told.merges.values())
    assert sum(told.labels.values()) == len(trajectory.traces) >= sum(told.breaks.values())
    if trajectory.builder.strategy != "prefix_merging" or config.get("on_drift") == "break":
        assert set(told.merges) <= {"exact"}


def _true(choices: list[Truth], ids: np.ndarray, logprobs: np.ndarray, start: int, end: int, prompt: int) -> Truth:
    """The choice that a turn shows: its ids in order from the first on, each with its own log-probability."""
    mine = ids[start:end].tolist()
    for one in choices:
        if (
            one.ids[: end - start] == mine
            and one.logprobs[: end - start] == logprobs[start - prompt : end - prompt].tolist()
        ):
            return one
    raise AssertionError("nothing was sampled that this turn shows")


def _text(ids: list[int]) -> str:
    """Without what no history shows: stop strings, and an empty thought that a prompt opens its reply with."""
    text = decode(ids).replace(f"gh<{END}>", f"<{END}>")
    assistant = f"<{BEGIN}><{ROLES['assistant']}><{NEWLINE}>"
    for opens in (f"<{THINK}><{NEWLINE}><{UNTHINK}><{NEWLINE}>", f"<{THINK}><{NEWLINE}>"):
        text = text.replace(assistant + opens, assistant)
    return text


TestHarness = Harness.TestCase
TestHarness.settings = settings(
    max_examples=40,
    stateful_step_count=22,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_the_plain_template_is_the_toys() -> None:
    """The state machine's template without habits renders as the other tests' does."""
    messages = [system("abc"), user("ab"), {"role": "assistant", "content": "cd"}, tool("d")]
    assert Template(keeps=False, opens="").prompt(messages, "ab") == render(messages, "ab")
