"""What a build makes of hand-made calls, id by id: how a case of `conformance_cases` is written, built and shown.

Ids: 1 begins a turn, 2 and 4 end one, 3 is a newline, 5 `user`, 6 `assistant`, 7 `tool`, 8 `<think>`, 9 `</think>`;
11, 12, 13 … are the letters a, b, c …; 33 is two newlines, 112 the letters ab in one id.

In an expected trace `[ ]` holds what was sampled and trains, `{ }` the same where the context is retokenized, `( )`
what was sampled and is masked. The first bracket is where the prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from polar.builder import rebuild
from polar.schemas import (
    BuilderSpec,
    Context,
    Label,
    Trace,
    Trajectory,
)
from tests.builder.toy import Message, Reply, Session


@dataclass(frozen=True)
class Call:
    prompt: str
    """Ids."""
    reply: str
    """Ids."""
    said: str
    """The prompt's messages: `user a | assistant b`."""
    text: str | None = None
    """The reply's; None: as in `said` of no call, a message of its own."""
    message: Message | None = None
    finish: str | None = "stop"
    stop: int | str | None = None
    tools: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    reply_more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    rule: str
    calls: list[Call]
    traces: list[str]
    """Expected: ids with brackets, then ` ; ` and what is said of the trace."""
    aside: list[str] = field(default_factory=list)
    """Expected: `call reason`."""
    config: dict[str, Any] = field(default_factory=dict)
    strategy: str = "prefix_merging"


def messages(said: str) -> list[Message]:
    found = []
    for one in filter(None, said.split(" | ")):
        role, _, text = one.partition(" ")
        found.append({"role": role, "content": text} | ({"tool_call_id": "1"} if role == "tool" else {}))
    return found


def tool_call(arguments: str) -> Message:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def ids(text: str) -> list[int]:
    return [int(one) for one in text.split()]


def build(case: Case) -> Trajectory:
    session = Session(builder=BuilderSpec(strategy=case.strategy, config=case.config))
    for call in case.calls:
        prompt: list[Message] = []
        for one in messages(call.said):
            # what is said of an earlier reply is its message, whole
            known = next((c.message for c in case.calls if c.message is not None and one["content"] == c.text), None)
            prompt.append(known if known is not None and one["role"] == "assistant" else one)
        message = call.message or {"role": "assistant", "content": call.text or ""}
        reply = Reply(ids(call.reply), message, call.finish, call.stop, **call.reply_more)
        more = dict(call.more)
        also = more.pop("also", None)
        others = [] if also is None else [Reply(ids(also[0]), {"role": "assistant", "content": also[1]})]
        session.call(prompt, reply, *others, tools=call.tools, prompt=ids(call.prompt), **more)
    session.close()
    return rebuild(session.records)


def shown(trajectory: Trajectory, trace: Trace) -> str:
    """A trace as cases write it."""
    view = trajectory.view(trace)
    numbers = [*view.prompt_ids.tolist(), *view.response_ids.tolist()]
    marks = [""] * len(numbers)
    for turn in trace.turns:
        trained = trace.trainable and turn.trainable
        mark = ("[]" if turn.context is Context.EXACT else "{}") if trained else "()"
        marks[turn.start : turn.end] = [mark] * (turn.end - turn.start)
    parts = []
    edges = {turn.start for turn in trace.turns}
    for mark, run in groupby(range(len(numbers)), key=lambda i: (marks[i], sum(edge <= i for edge in edges))):
        text = " ".join(str(numbers[i]) for i in run)
        parts.append(f"{mark[0][0]}{text}{mark[0][1]}" if mark[0] else text)
    return " ".join([" ".join(parts), *(f"; {one}" for one in told(trace))])


def told(trace: Trace) -> list[str]:
    """What is said of a trace beside its ids."""
    found = [] if trace.label is Label.MAIN else [str(trace.label)]
    found += [f"{one.turn}@{one.position}: {one.sampled} for {one.canonical}" for one in trace.drift]
    found += [turn.untrainable for turn in trace.turns if turn.untrainable]
    found += [f"experts {turn.experts_dropped}" for turn in trace.turns if turn.experts_dropped]
    found += [f"image at {one.offset}" for one in trace.media]
    found += ["weights " + ", ".join(trace.policy_versions)] if len(trace.policy_versions) > 1 else []
    found += [f"cut {trace.cut}"] if trace.cut else []
    found += [f"shares {trace.shares.length} of trace {trace.shares.trace}"] if trace.shares else []
    detail = f" ({trace.break_detail})" if trace.break_detail else ""
    return [*found, f"ends: {trace.break_reason}{detail}"] if trace.break_reason else found


def set_aside(trajectory: Trajectory) -> list[str]:
    return [f"{one.completion_id.rpartition('c')[2]} {one.reason}" for one in trajectory.set_aside]


def table(cases: Sequence[Case]) -> str:
    """The cases as the docs show them."""
    rows = ["| rule | calls: prompt → sampled | traces |", "|---|---|---|"]
    for case in cases:
        calls = "<br>".join(f"`{one.prompt}` → `{one.reply}`" for one in case.calls)
        traces = "<br>".join(map(_row, case.traces))
        aside = "".join(f"<br>call {one.replace(' ', ' set aside: ', 1)}" for one in case.aside)
        rows.append(f"| {case.rule} | {calls} | {traces}{aside} |")
    return "\n".join(rows)


def _row(trace: str) -> str:
    numbers, *words = trace.split(" ; ")
    return " ".join([f"`{numbers}`", "; ".join(words)]).strip()
