"""What one sample is in a trace: its turns, with what trains of them.

A sample is one turn, except where only a part of it may train (an id without log-probability, a stretch whose policy
version is unknown): then it is several turns in a row, so that a missing number never costs its neighbours. Pure.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from polar.schemas import Context, LogprobsMode, PolicySpan, RoutedExperts, Turn

from .config import TrainConfig
from .samples import Sample

CUT: Final = frozenset({"length", "abort", "error", "repetition"})
"""Finish reasons that are not the policy's own end of turn; a missing one is too."""
ABORTED: Final = frozenset({"abort", "error"})


def truncated(sample: Sample) -> bool:
    """Whether the reply was cut instead of ended."""
    finish = sample.choice.finish
    return finish is None or finish in CUT or not sample.completion.complete


def untrainable(sample: Sample, config: TrainConfig) -> str | None:
    """Why no token of the sample trains, or None."""
    completion, choice = sample.completion, sample.choice
    temperature = completion.sampling.temperature
    if completion.constraints and not config.train_constrained:
        return "constrained"
    if temperature == 0 and not config.train_greedy:
        return "temperature_0"
    if temperature not in (None, 0, 1) and completion.engine.logprobs_mode is not LogprobsMode.PROCESSED:
        return "logprobs_mode"
    aborted = choice.finish is None or choice.finish in ABORTED or not completion.complete
    if aborted and not config.train_aborted:
        return "aborted"
    return None


_TRAINS, _NO_LOGPROB, _INEXACT = 0, 1, 2
_REASONS: Final = {_TRAINS: None, _NO_LOGPROB: "no_logprob", _INEXACT: "policy_version"}


def turns_of(
    sample: Sample,
    logprobs: npt.NDArray[np.float32],
    *,
    at: int,
    context: Context,
    tools: int | None,
    config: TrainConfig,
    masked: str | None = None,
) -> list[Turn]:
    """The sample's turns, the first of which starts at position `at` of its trace.

    Args:
        logprobs: of the sampled ids, shape `(n,)`.
        tools: index into the trajectory's tools.
        masked: a reason of the trace's not to train this sample.
    """
    length = len(logprobs)
    whole = masked or untrainable(sample, config)
    state = _state(sample, logprobs, config) if whole is None else None
    edges = [0, length] if state is None else [0, *(np.flatnonzero(np.diff(state)) + 1).tolist(), length]
    found = []
    for start, end in pairwise(edges):
        last = end == length
        why = whole if state is None else _REASONS[int(state[start])]
        found.append(
            Turn(
                completion_id=sample.completion.completion_id,
                start=at + start,
                end=at + end,
                finish=sample.choice.finish if last else None,
                truncated=last and truncated(sample),
                tools=tools,
                policy=_clipped(sample.choice.spans, start, end),
                sampling=sample.completion.sampling,
                constraints=sample.completion.constraints,
                context=context,
                trainable=why is None,
                untrainable=why,
                routed_experts=_experts(sample, start, context),
                experts_dropped=_experts_dropped(sample, context),
            )
        )
    return found


def _state(sample: Sample, logprobs: npt.NDArray[np.float32], config: TrainConfig) -> npt.NDArray[np.uint8] | None:
    """What hinders each id from training; None: nothing does."""
    inexact = [] if config.train_inexact_policy else [span for span in sample.choice.spans if not span.exact]
    missing = np.isnan(logprobs)
    if not inexact and not missing.any():
        return None
    state = np.zeros(len(logprobs), np.uint8)
    for span in inexact:
        state[span.start : span.end] = _INEXACT
    state[missing] = _NO_LOGPROB
    return state


def _experts(sample: Sample, start: int, context: Context) -> RoutedExperts | None:
    claim = sample.choice.routed_experts
    return None if claim is None or context is not Context.EXACT else RoutedExperts(claim=claim, start=start)


def _experts_dropped(sample: Sample, context: Context) -> str | None:
    """Routes belong to one context: on other ids before them they would be replayed in the wrong place."""
    return None if sample.choice.routed_experts is None or context is Context.EXACT else str(context)


def cut_at(turns: list[Turn], limit: int) -> list[Turn]:
    """The turns within the first `limit` ids of their trace."""
    found = []
    for turn in turns:
        if turn.end <= limit:
            found.append(turn)
        elif turn.start < limit:
            policy = _clipped(turn.policy, 0, limit - turn.start)
            found.append(msgspec.structs.replace(turn, end=limit, finish=None, truncated=True, policy=policy))
    return found


def _clipped(spans: list[PolicySpan], start: int, end: int) -> list[PolicySpan]:
    """`spans` within `start` to `end`, relative to `start`."""
    found = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if start == 0 and (first, last) == (span.start, span.end) and first < last:
            found.append(span)
        elif first < last:
            found.append(msgspec.structs.replace(span, start=first - start, end=last - start))
    return found
