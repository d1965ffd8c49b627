"""`polar show`: one session's traces, token by token.

Given tokens are dim, trainable ones are coloured by the probability with which they were sampled, and underlined where
re-tokenizing the text would have trained on other ids. Sampled tokens that do not train are magenta.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from polar.schemas import Outcome, Trace, Trajectory, Turn

from .tokens import pieces, retokenized

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBABLE = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Colour by least probability."""


def show(
    out: Console, trajectory: Trajectory, tokenizer: Tokenizer | None, *, limit: int | None, numbers: bool
) -> None:
    """Print a trajectory.

    Args:
        limit: most tokens printed per trace, from the end; None: all.
        numbers: print each trainable token's probability beside it.
    """
    outcome = trajectory.outcome
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    out.print(
        f"[bold]session {trajectory.session_id}[/]  sample {trajectory.sample} of {trajectory.num_samples}  "
        f"attempt {trajectory.attempt}  {_ending(outcome)}  reward [bold]{reward}[/]"
    )
    out.print(
        f"built by {trajectory.builder.strategy} from {trajectory.captured} calls, graded by "
        f"{trajectory.evaluator.strategy}; {len(trajectory.traces)} traces, {len(trajectory.set_aside)} set aside"
    )
    for error in filter(None, (outcome.failure, trajectory.error)):
        out.print(Text(f"  {error.kind}: {error.message}", "red"))
        tail = (error.detail or {}).get("output_tail")
        if tail:
            out.print(Text("".join(f"  | {line}\n" for line in str(tail).splitlines()[-12:]), "dim"))
    for number, trace in enumerate(trajectory.traces):
        _trace(out, trajectory, trace, number, tokenizer, limit, numbers)
    for one in trajectory.set_aside:
        out.print(
            Text(f"set aside: {one.completion_id} ({one.reason}){': ' + one.detail if one.detail else ''}", "dim")
        )
    if tokenizer is None and trajectory.traces:
        out.print("ids only: name the model's tokenizer.json with --tokenizer (or POLAR_TOKENIZER) to see text")


def _ending(outcome: Outcome) -> str:
    colour = {"completed": "green", "timeout": "yellow"}.get(outcome.status, "red")
    return f"[{colour}]{outcome.status}[/]"


def _trace(
    out: Console,
    trajectory: Trajectory,
    trace: Trace,
    number: int,
    tokenizer: Tokenizer | None,
    limit: int | None,
    numbers: bool,
) -> None:
    view = trajectory.view(trace)
    trained = int(view.loss_mask.sum())
    header = f"trace {number}  {trace.label}  {len(trace.turns)} turns  prompt {len(view.prompt_ids)}  "
    header += f"response {len(view.response_ids)}  trained {trained}"
    if trace.break_reason:
        header += f"  ended by {trace.break_reason}"
    out.rule(header, align="left")
    for index, turn in enumerate(trace.turns):
        out.print(Text(_turn(index, turn), "dim"))
    ids = np.concatenate([view.prompt_ids, view.response_ids])
    logprobs = np.concatenate([np.zeros(len(view.prompt_ids), np.float32), view.response_logprobs])
    mask = np.concatenate([np.zeros(len(view.prompt_ids), np.uint8), view.loss_mask])
    sampled = np.zeros(len(ids), np.bool_)
    changed = np.zeros(len(ids), np.bool_)
    for turn in trace.turns:
        sampled[turn.start : turn.end] = True
        if tokenizer is not None:
            changed[turn.start : turn.end] = retokenized(tokenizer, ids[turn.start : turn.end])
    texts = pieces(tokenizer, ids) if tokenizer is not None else [f"{one} " for one in ids]
    first = 0 if limit is None else max(0, len(ids) - limit)
    line = Text()
    if first:
        line.append(f"… {first} tokens before …\n", "dim italic")
    for i in range(first, len(ids)):
        style = "dim"
        if sampled[i]:
            style = _colour(float(logprobs[i])) if mask[i] else "magenta"
            if changed[i]:
                style += " underline"
        line.append(texts[i], style)
        if numbers and mask[i]:
            line.append(f"⁽{math.exp(float(logprobs[i])):.2f}⁾", "dim")
    out.print(line, soft_wrap=True)
    if tokenizer is not None and trained:
        differing = int((changed & (mask == 1)).sum())
        out.print(
            f"[dim]{differing} of {trained} trained tokens would be other ids if the text were re-tokenized; "
            f"mean log-probability {float(logprobs[mask == 1].mean()):.3f}[/]"
        )
    for drift in trace.drift:
        out.print(
            Text(
                f"turn {drift.turn}: the engine later read {drift.canonical} ids where {drift.sampled} were sampled, "
                f"from token {drift.position}",
                "yellow",
            )
        )


def _turn(index: int, turn: Turn) -> str:
    told = f"  turn {index}: tokens {turn.start}–{turn.end}, {turn.finish or 'cut off'}, context {turn.context}"
    versions = {span.version for span in turn.policy}
    if versions:
        told += f", policy {', '.join(sorted(versions))}"
    if not turn.trainable:
        told += f", not trained: {turn.untrainable or 'masked'}"
    return told


def _colour(logprob: float) -> str:
    probability = math.exp(logprob)
    return next(colour for least, colour in PROBABLE if probability >= least)
