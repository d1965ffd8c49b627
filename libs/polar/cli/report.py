"""The end of a task, for people: rewards, advantages, what there is to train on, and what went wrong."""

from __future__ import annotations

import math
from collections import defaultdict

from rich.console import Console
from rich.text import Text

from polar.client import advantages_of, group_advantages
from polar.schemas import Failure, GroupClosed, Trajectory

from .output import plain_table, visible

TAIL_LINES = 8
"""Of a harness's last output."""


def report(out: Console, trajectories: list[Trajectory], groups: list[GroupClosed]) -> None:
    """A row per session, then each kind of failure once, then how to look closer."""
    table = plain_table(
        ("#", "right"),
        ("session", "id"),
        ("status", "left"),
        ("reward", "right"),
        ("adv.", "right"),
        ("calls", "right"),
        ("tokens", "right"),
        gap=1,  # an id and six numbers in 80 columns
    )
    advantages = session_advantages(trajectories, groups)
    for one in trajectories:
        advantage = advantages.get(one.session_id)
        failure = one.outcome.failure
        table.add_row(
            str(one.sample),
            Text(one.session_id),
            Text(str(failure.kind), "red") if failure is not None else Text(str(one.status), "green"),
            "–" if one.reward is None else f"{one.reward:g}",
            "–" if advantage is None else f"{advantage:+.2f}",
            str(one.captured),
            str(trained_tokens(one)),
        )
    out.print(table)
    rewards = [one.reward for one in trajectories if one.reward is not None]
    if rewards:
        tokens = sum(map(trained_tokens, trajectories))
        out.print(
            f"mean reward {sum(rewards) / len(rewards):.3f} over {len(rewards)} of {len(trajectories)} sessions; "
            f"{tokens} tokens to train on",
            soft_wrap=True,
        )
    failures(out, trajectories)
    traced = [one for one in trajectories if one.traces]
    if traced:
        best = max(traced, key=lambda one: (-math.inf if one.reward is None else one.reward, one.captured))
        out.print(f"token by token: polar show {best.session_id}", markup=False, soft_wrap=True)


def session_advantages(trajectories: list[Trajectory], groups: list[GroupClosed]) -> dict[str, float | None]:
    """Advantages by session id: those of its closed group, or among the sessions given where the group is open."""
    closed = {one.group_id: advantages_of(one) for one in groups}
    found: dict[str, float | None] = {}
    open_: dict[str, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        if one.group_id in closed:
            found[one.session_id] = closed[one.group_id].get(one.session_id)
        else:
            open_[one.group_id].append(one)
    for members in open_.values():
        for one, advantage in zip(members, group_advantages([one.reward for one in members]), strict=True):
            found[one.session_id] = advantage
    return found


def trained_tokens(trajectory: Trajectory) -> int:
    """Sampled ids with loss mask 1, over all traces."""
    return sum(int(trajectory.view(trace).loss_mask.sum()) for trace in trajectory.traces)


def failures(out: Console, trajectories: list[Trajectory]) -> None:
    """Each kind of failure once: how many, the first one's message and its harness's last output."""
    by_kind: dict[str, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        failure = one.outcome.failure or one.error
        if failure is not None:
            by_kind[failure.kind].append(one)
    for kind, ones in by_kind.items():
        first = ones[0].outcome.failure or ones[0].error
        assert first is not None
        sessions = "1 session" if len(ones) == 1 else f"{len(ones)} sessions"
        line = Text(visible(f"{kind} in {sessions}, first in sample {ones[0].sample}: {first.message}"))
        line.stylize("red", 0, len(kind))
        out.print(line, soft_wrap=True)
        print_tail(out, first, TAIL_LINES)


def print_tail(out: Console, failure: Failure, lines: int) -> None:
    """The last lines that the harness wrote, where the failure has them."""
    for line in str((failure.detail or {}).get("output_tail") or "").splitlines()[-lines:]:
        out.print(Text(f"  | {visible(line)}", "dim"), soft_wrap=True)
