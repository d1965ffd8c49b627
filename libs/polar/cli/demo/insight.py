"""What the demo shows of a finished run: a trace token by token, what re-tokenizing would change, two builders.

Functions over trajectories, records and a tokenizer; they print nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from polar.schemas import BuilderSpec, Context, Trace, Trajectory, encode

from ..show import marked
from ..tokens import pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from polar.builder import Entry

STRATEGIES = ("per_request", "prefix_merging")
ENOUGH = 6
"""Changed tokens beyond which more make an example no better."""


@dataclass(frozen=True)
class Token:
    """One id of a trace. `logprob` is None where it was not sampled; `changed`: re-tokenizing puts another there.

    `invented`: the end of a turn that was cut off, which the template writes and the policy never sampled.
    """

    id: int
    text: str
    logprob: float | None
    trained: bool
    changed: bool
    invented: bool


@dataclass(frozen=True)
class Change:
    """A stretch of sampled text whose ids re-tokenizing changes: pairs of id and text."""

    turn: int
    sampled: list[tuple[int, str]]
    again: list[tuple[int, str]]


@dataclass(frozen=True)
class Example:
    """A trace with names for its ids."""

    trajectory: Trajectory
    trace: Trace
    tokens: list[Token]
    changes: list[Change]

    @property
    def trained(self) -> int:
        return sum(one.trained for one in self.tokens)

    @property
    def changed(self) -> int:
        """Trained ids that re-tokenizing would change."""
        return sum(one.trained and one.changed for one in self.tokens)

    @property
    def invented(self) -> int:
        """Ends of turns that nobody sampled, which a transcript's assistant messages would train."""
        return sum(one.invented for one in self.tokens)


@dataclass(frozen=True)
class Built:
    """A session as one strategy builds it.

    `traces`: each as runs of (length, trained). `read`: ids that a trainer's forward passes go over. `stored`: ids in
    the trajectory's pool. `size`: bytes on the log.
    """

    strategy: str
    traces: list[list[tuple[int, bool]]]
    read: int
    stored: int
    trained: int
    size: int


def changes(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[list[tuple[int, str]], list[tuple[int, str]]]]:
    """Where encoding the text of `ids` gives others: the shortest stretches of the same text, sampled and encoded."""
    before = pieces(tokenizer, list(ids))
    others = tokenizer.encode("".join(before), add_special_tokens=False).ids
    if list(others) == list(ids):
        return []
    after = pieces(tokenizer, others)
    ends = _ends(before), _ends(after)
    common = sorted({0, *(set(ends[0]) & set(ends[1]))})
    found = []
    for low, high in pairwise(common):
        sampled, again = (
            [(int(one), text) for one, text, end in zip(numbers, texts, places, strict=True) if low < end <= high]
            for numbers, texts, places in ((ids, before, ends[0]), (others, after, ends[1]))
        )
        if [one for one, _ in sampled] != [one for one, _ in again]:
            found.append((sampled, again))
    return found


def _ends(texts: Sequence[str]) -> list[int]:
    """The character at which each token ends; one with no text of its own ends with the next that has."""
    ends = [int(end) for end in np.cumsum([len(text) for text in texts])]
    for i in range(len(texts) - 2, -1, -1):
        if not texts[i]:
            ends[i] = ends[i + 1]
    return ends


def rate(trajectory: Trajectory, tokenizer: Tokenizer) -> float:
    """How well a session's first trace shows what re-tokenizing does; 0: not at all."""
    if not trajectory.traces or trajectory.reward is None:
        return 0.0
    trace = trajectory.traces[0]
    view = trajectory.view(trace)
    ids = np.concatenate([view.prompt_ids, view.response_ids])
    found = [one for turn in trace.turns for one in changes(ids[turn.start : turn.end].tolist(), tokenizer)]
    wrong = sum(len(sampled) for sampled, _ in found)
    if not wrong:
        return 0.0
    text = "".join(part for sampled, _ in found for _, part in sampled)
    legible = sum(one.isascii() and (one.isalnum() or one == " ") for one in text) / max(1, len(text))
    read_again = any(turn.context is not Context.EXACT for turn in trace.turns)
    return min(wrong, ENOUGH) + 3 * legible + 2 * min(len(trace.turns), 3) + 4 * read_again


def example(trajectory: Trajectory, tokenizer: Tokenizer) -> Example:
    """The first trace of a trajectory that has one."""
    trace = trajectory.traces[0]
    marks = marked(trajectory, trace, tokenizer)
    edges = {edge for turn in trace.turns for edge in (turn.start, turn.end)}
    cut = {turn.end for turn in trace.turns if turn.truncated}
    texts = pieces(tokenizer, marks.ids, edges)
    tokens = [
        Token(
            id=int(marks.ids[i]),
            text=text,
            logprob=float(marks.logprobs[i]) if marks.sampled[i] else None,
            trained=bool(marks.trained[i]),
            changed=bool(marks.changed[i]),
            invented=i in cut and not marks.sampled[i],
        )
        for i, text in enumerate(texts)
    ]
    found = [
        Change(number, sampled, again)
        for number, turn in enumerate(trace.turns)
        for sampled, again in changes(marks.ids[turn.start : turn.end].tolist(), tokenizer)
    ]
    return Example(trajectory, trace, tokens, found)


def choose(trajectories: Iterable[Trajectory], tokenizer: Tokenizer) -> Trajectory | None:
    """The session that shows best what re-tokenizing does, or any that has a trace."""
    usable = [one for one in trajectories if one.traces]
    rated = [(rate(one, tokenizer), -number, one) for number, one in enumerate(usable)]
    return max(rated, key=lambda item: item[:2])[2] if rated else None


def compared(entries: Sequence[Entry]) -> list[Built]:
    """One session's records, in log order, built by each strategy."""
    from polar.builder import rebuild

    found = []
    for name in STRATEGIES:
        trajectory = rebuild(entries, BuilderSpec(strategy=name))
        views = [trajectory.view(trace) for trace in trajectory.traces]
        found.append(
            Built(
                strategy=name,
                traces=[_runs([*(0 for _ in view.prompt_ids), *view.loss_mask.tolist()]) for view in views],
                read=sum(len(view.prompt_ids) + len(view.response_ids) for view in views),
                stored=len(trajectory.pool.tokens.array),
                trained=sum(int(view.loss_mask.sum()) for view in views),
                size=len(encode(trajectory)),
            )
        )
    return found


def _runs(mask: Sequence[int]) -> list[tuple[int, bool]]:
    return [(len(list(run)), bool(one)) for one, run in groupby(mask)]


def read_again(example: Example) -> str:
    """What became of turns whose context the engine read in other ids than were sampled; empty where there are none."""
    turns = [number for number, turn in enumerate(example.trace.turns) if turn.context is not Context.EXACT]
    if not turns:
        return ""
    names = ", ".join(map(str, turns))
    return (
        f"The trace keeps the ids that were sampled. Before turn {names} the engine read the re-tokenized text, so "
        "that context is marked as retokenized, for a trainer that wants exact ones only."
    )


def invented(count: int) -> str:
    """What to say of ends of turns that nobody sampled."""
    ends = "1 end of a turn" if count == 1 else f"{count} ends of turns"
    return f"And {ends} that the model never sampled, since it was cut off there, would be trained as if it had."
