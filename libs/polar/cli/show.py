"""`polar show`: one session's traces, token by token.

Given tokens are dim, trainable ones are coloured by the probability with which they were sampled, and underlined where
re-tokenizing the text would have trained on other ids. Sampled tokens that do not train are magenta. Without colours,
brackets tell the same.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from polar.schemas import Trace, Trajectory, Turn

from .output import visible
from .report import print_tail
from .tokens import pieces, retokenized
from .words import EngineTokenizer, NoWords, engine_named

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBABLE = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Colour by least probability."""
CONTEXT = 8
"""Tokens before the first shown one that a character of it may begin in."""
TURNS = 12
"""Turns listed, the last ones, where tokens are limited."""
TAIL_LINES = 12
ASKED = 20_000
"""Ids of a trajectory beyond which the engine is not asked for their names: a few requests each, at 1 ms."""


def show_named(out: Console, trajectory: Trajectory, tokenizer: Tokenizer | None, **how: Any) -> None:
    """`show`, where no tokenizer is given with the names that the engine of the settings gives its ids. Blocks."""
    url = engine_named(os.environ, trajectory.models) if tokenizer is None and trajectory.traces else None
    if url is not None and len(trajectory.pool.tokens) <= ASKED:
        try:
            with EngineTokenizer(url) as words:
                words.speak(trajectory.models)
                show(out, trajectory, cast("Tokenizer", words), **how)  # it has what is asked of one
        except NoWords as error:
            out.print(Text(visible(f"the engine does not name the ids: {error}"), "yellow"), soft_wrap=True)
        else:
            return
    show(out, trajectory, tokenizer, **how)


def show(
    out: Console,
    trajectory: Trajectory,
    tokenizer: Tokenizer | None,
    *,
    only: int | None = None,
    limit: int | None = None,
    numbers: bool = False,
) -> None:
    """Print a trajectory.

    Args:
        only: the index of the one trace to print.
        limit: most tokens printed per trace, from the end; None: all.
        numbers: print each trainable token's probability beside it.
    """
    _head(out, trajectory)
    for number, trace in enumerate(trajectory.traces):
        if only is None or number == only:
            _trace(out, trajectory, trace, number, tokenizer, limit, numbers)
    for one in trajectory.set_aside:
        detail = f": {one.detail}" if one.detail else ""
        out.print(Text(visible(f"set aside: {one.completion_id} ({one.reason}){detail}"), "dim"), soft_wrap=True)
    if tokenizer is None and trajectory.traces:
        out.print("ids only: name the model's tokenizer with --tokenizer (or POLAR_TOKENIZER) to see text")


def _head(out: Console, trajectory: Trajectory) -> None:
    outcome = trajectory.outcome
    colour = {"completed": "green", "timeout": "yellow"}.get(outcome.status, "red")
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    line = Text(f"session {trajectory.session_id}  ", "bold").append(str(outcome.status), colour)
    out.print(line.append(f"  reward {reward}"), soft_wrap=True)
    told = f"sample {trajectory.sample} of {trajectory.num_samples}, attempt {trajectory.attempt}, "
    told += f"task {trajectory.task_id}"
    out.print(Text(told), soft_wrap=True)
    told = f"{trajectory.captured} calls, {trajectory.failed} failed; {len(trajectory.traces)} traces by "
    told += f"{trajectory.builder.strategy}, {len(trajectory.set_aside)} calls set aside; graded by "
    out.print(Text(visible(told + trajectory.evaluator.strategy)), soft_wrap=True)
    if trajectory.rewards:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
        out.print(Text(visible(f"rewards: {parts}")), soft_wrap=True)
    for failure in filter(None, (outcome.failure, trajectory.error)):
        out.print(Text(visible(f"{failure.kind}: {failure.message}"), "red"), soft_wrap=True)
        print_tail(out, failure, TAIL_LINES)


class Marked(NamedTuple):
    """A trace's tokens, prompt and response together; all of shape `(n,)`."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled: npt.NDArray[np.bool_]
    trained: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]
    """Sampled ids in whose place re-tokenizing puts others; none without a tokenizer."""


def marked(trajectory: Trajectory, trace: Trace, tokenizer: Tokenizer | None) -> Marked:
    """What `show` tells of each token of a trace."""
    view = trajectory.view(trace)
    prompt = len(view.prompt_ids)
    ids = np.concatenate([view.prompt_ids, view.response_ids])
    sampled, changed = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    for turn in trace.turns:
        sampled[turn.start : turn.end] = True
        if tokenizer is not None:
            changed[turn.start : turn.end] = retokenized(tokenizer, ids[turn.start : turn.end])
    return Marked(
        ids,
        np.concatenate([np.zeros(prompt, np.float32), view.response_logprobs]),
        sampled,
        np.concatenate([np.zeros(prompt, np.bool_), view.loss_mask.astype(np.bool_)]),
        changed,
    )


def _trace(
    out: Console,
    trajectory: Trajectory,
    trace: Trace,
    number: int,
    tokenizer: Tokenizer | None,
    limit: int | None,
    numbers: bool,
) -> None:
    tokens = marked(trajectory, trace, tokenizer)
    trained = int(tokens.trained.sum())
    out.print()
    header = f"trace {number} ({trace.label}): {len(trace.turns)} turns, prompt {trace.prompt_length}, "
    header += f"response {len(tokens.ids) - trace.prompt_length}, trained {trained}"
    if not trace.trainable:
        header += ", not trainable"
    if trace.break_reason:
        header += f", ended by {trace.break_reason}"
    if trace.reward is not None and trace.reward != trajectory.reward:
        header += f", reward {trace.reward:g}"
    out.print(Text(visible(header), "bold"), soft_wrap=True)
    hidden = max(0, len(trace.turns) - TURNS) if limit is not None else 0
    if hidden:
        out.print(Text(f"  … {hidden} turns before", "dim"))
    for index, turn in enumerate(trace.turns):
        if index >= hidden:
            out.print(Text(visible(_turn(index, turn)), "dim"), soft_wrap=True)
    first = 0 if limit is None else max(0, len(tokens.ids) - limit)
    if first:
        out.print(Text(f"… {first} tokens before (--limit 0 shows all)", "dim italic"))
    plain = out.color_system is None or out.no_color
    out.print(_text(tokens, trace, tokenizer, first, numbers, plain), soft_wrap=True)
    if trained:
        told = f"mean log-probability {float(np.mean(tokens.logprobs[tokens.trained])):.3f}"
        if tokenizer is not None:
            differing = int((tokens.changed & tokens.trained).sum())
            told += f"; re-tokenizing the text would change {differing} of {trained} trained tokens"
        out.print(Text(told, "dim"), soft_wrap=True)
    if tokenizer is not None and (foreign := sum(tokenizer.id_to_token(int(one)) is None for one in set(tokens.ids))):
        out.print(f"[red]{foreign} ids are not in this tokenizer: is it this model's?[/]", soft_wrap=True)
    for drift in trace.drift:
        told = f"turn {drift.turn}: the engine later read {drift.canonical} ids where {drift.sampled} were sampled, "
        out.print(Text(f"{told}from token {drift.position} of the turn on", "yellow"), soft_wrap=True)


def _text(tokens: Marked, trace: Trace, tokenizer: Tokenizer | None, first: int, numbers: bool, plain: bool) -> Text:
    if tokenizer is None:
        texts = [f"{one} " for one in tokens.ids[first:]]
    else:
        start = max(0, first - CONTEXT)
        edges = {edge - start for turn in trace.turns for edge in (turn.start, turn.end)}
        texts = pieces(tokenizer, tokens.ids[start:], edges)[first - start :]
    line = Text()
    open_ = ""
    for i, piece in enumerate(texts, first):
        logprob = float(tokens.logprobs[i])
        style, closing = "dim", ""
        if tokens.trained[i]:
            style, closing = _colour(logprob), "⟧"
        elif tokens.sampled[i]:
            style, closing = "magenta", "⟩"
        if tokens.changed[i]:
            style += " underline"
        if plain and closing != open_:
            line.append(open_ + {"⟧": "⟦", "⟩": "⟨", "": ""}[closing])
            open_ = closing
        if plain and tokens.changed[i]:
            line.append("~")
        line.append(visible(piece), style)
        if numbers and tokens.trained[i]:
            line.append(f"({math.exp(logprob):.2f})", "dim")
    return line.append(open_)


def _turn(index: int, turn: Turn) -> str:
    told = f"  turn {index}: tokens {turn.start}–{turn.end}, {turn.finish or 'cut off'}, context {turn.context}"
    if turn.truncated:
        told += ", truncated"
    if turn.constraints:
        told += f", constrained by {', '.join(turn.constraints)}"
    versions = {span.version for span in turn.policy if span.version}
    if versions:
        told += f", policy {', '.join(sorted(versions))}"
    if not turn.trainable:
        told += f", not trained: {turn.untrainable or 'masked'}"
    return told


def _colour(logprob: float) -> str:
    """By probability; red also where the engine told none (NaN)."""
    probability = math.exp(min(logprob, 0.0))
    return next((colour for least, colour in PROBABLE if probability >= least), "red")
