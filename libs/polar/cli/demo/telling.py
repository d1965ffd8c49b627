"""What the demo prints of its findings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..output import plain_table, visible
from ..show import PROBABLE
from .insight import Built, Example, invented, read_again
from .page import Group

SHOWN_CHANGES = 8


def group(out: Console, found: Group) -> None:
    """Rewards and advantages of a finished group, a column per sample."""
    rewards = [one.reward for one in found.trajectories if one.reward is not None]
    head = Text(f"\n{found.name}", "bold").append(f": group done {found.after_s:.0f} s after the start", "default")
    if rewards:
        head.append(f", mean reward {sum(rewards) / len(rewards):.2f}")
    out.print(head, soft_wrap=True)
    table = plain_table(("", "left"), *((f"#{one.sample}", "right") for one in found.trajectories))
    given, relative = [], []
    for one in found.trajectories:
        advantage = found.advantages.get(one.session_id)
        colour = "dim" if one.reward is None else "bold green" if one.reward > 0 else "red"
        failure = one.outcome.failure
        given.append(Text("–" if one.reward is None else f"{one.reward:g}", colour))
        relative.append(Text(str(failure.kind) if failure else "–" if advantage is None else f"{advantage:+.2f}"))
    table.add_row("reward", *given)
    table.add_row("advantage", *relative)
    out.print(table)


def example(out: Console, found: Example) -> None:
    """One trace in colour, and the tokens that re-tokenizing its text would change."""
    one = found.trajectory
    reward = "none" if one.reward is None else f"{one.reward:g}"
    turns = len(found.trace.turns)
    told = f"session {one.session_id}, {turns} turns in one trace, reward {reward}; "
    out.print(Text("\none trace, token by token", "bold"))
    out.print(
        Text(f"{told}coloured: sampled and trained, by probability; ~underlined~: see below", "dim"), soft_wrap=True
    )
    line, plain = Text(), out.color_system is None or out.no_color
    open_ = False
    for token in found.tokens:
        if plain and token.trained != open_:
            line.append("⟦" if token.trained else "⟧")
            open_ = token.trained
        if plain and (token.changed or token.invented):
            line.append("~")
        line.append(visible(token.text), _style(token.logprob, marked=token.changed or token.invented))
    line.append("⟧" if open_ else "")
    out.print(line, soft_wrap=True)
    if not found.changes:
        out.print(Text("re-tokenizing this trace's text would change none of its trained tokens", "dim"))
        return
    out.print(
        f"[bold]{found.changed} of {found.trained} trained tokens[/] would be other ids if the transcript's text were "
        "tokenized again:",
        soft_wrap=True,
    )
    for change in found.changes[:SHOWN_CHANGES]:
        told = f"  turn {change.turn}: sampled {_pieces(change.sampled)}, re-tokenized {_pieces(change.again)}"
        out.print(Text(told), soft_wrap=True)
    more = len(found.changes) - SHOWN_CHANGES
    if more > 0:
        out.print(Text(f"  … and {more} more places", "dim"))
    if found.invented:
        out.print(Text(f"  {invented(found.invented)}"), soft_wrap=True)
    if told := read_again(found):
        out.print(Text(told, "dim"), soft_wrap=True)


def _style(logprob: float | None, *, marked: bool) -> str:
    if logprob is None:
        return "dim underline" if marked else "dim"
    probability = math.exp(min(logprob, 0.0))
    colour = next((colour for least, colour in PROBABLE if probability >= least), "red")
    return f"{colour} underline" if marked else colour


def _pieces(pieces: Sequence[tuple[int, str]]) -> str:
    return " ".join(f"{visible(text)!r} {number}" for number, text in pieces)


def built(out: Console, found: Sequence[Built]) -> None:
    """The same session by each strategy."""
    out.print(Text("\nthe same session, built again from the log by each strategy", "bold"))
    table = plain_table(
        ("", "left"), ("traces", "right"), ("tokens to read", "right"), ("trained", "right"), ("on the log", "right")
    )
    for one in found:
        size = f"{one.size / 1024:.1f} kB"
        table.add_row(one.strategy, str(len(one.traces)), str(one.read), str(one.trained), size)
    out.print(table)
