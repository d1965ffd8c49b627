"""From a strategy's chains to a trajectory's traces.

A strategy only says which samples follow each other; everything a trainer relies on is made here, the same for every
strategy: ids come from the pool, mask 1 can stand on sampled ids only, and `exact` is claimed only where the pool
shows, id for id, that the context before a sampled turn is the one the engine had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from polar.schemas import Context, Drift, Label, Pool, Trace, Turn
from polar.schemas import Span as WireSpan
from polar.schemas.ids import derived

from .config import TrainConfig
from .messages import runs
from .pool import Packed, Span, joined, skipped
from .samples import Material, Sample
from .turns import turns_of

MASKED_BY_DRIFT: Final = "retokenized"


class Drifted(NamedTuple):
    """How a prompt renders the reply it continues, where not as sampled."""

    position: int
    """First differing position within the reply."""
    sampled: int
    canonical: int


@dataclass(slots=True)
class Link:
    """A sample in a chain."""

    sample: Sample
    standing: int = 0
    """The first so many ids of its prompt are stood for by what the chain holds already; 0 in the first link."""
    drift: Drifted | None = None
    """How its prompt renders the reply before it; None: as sampled."""


@dataclass(slots=True)
class Chain:
    """A trace to be: its first sample's prompt whole, then replies and what was given between them."""

    links: list[Link]
    label: Label = Label.MAIN
    break_reason: str | None = None
    mask_drift: bool = False
    """Mask the turns whose context is retokenized."""
    metadata: dict[str, str] = field(default_factory=dict)


def assemble(
    material: Material, chains: list[Chain], config: TrainConfig, trajectory_id: str
) -> tuple[Pool, list[Trace]]:
    """Pool and traces, in the order of `chains`. Deterministic."""
    segments = [_segments(chain) for chain in chains]
    packed = material.tokens.pack(span for one in segments for span in one)
    messages = _Numbers()
    tools = _Numbers()
    traces = []
    for chain, spans in zip(chains, segments, strict=True):
        first = chain.links[0].sample
        turns, drift = _turns(material, chain, config, tools)
        traces.append(
            Trace(
                trace_id=derived("trace", trajectory_id, first.completion.completion_id, first.choice.index),
                segments=packed.spans(spans),
                prompt_length=first.prompt_length,
                turns=turns,
                label=chain.label,
                trainable=chain.label in config.train_labels,
                prompt_messages=messages.spans(first.messages.tolist()),
                response_messages=messages.spans(_response_messages(chain)),
                drift=drift,
                break_reason=chain.break_reason,
                metadata=dict(chain.metadata),
            )
        )
    return _pool(material, packed, messages, tools), traces


def _segments(chain: Chain) -> list[Span]:
    first = chain.links[0].sample
    spans = [*first.prompt, first.reply]
    for link in chain.links[1:]:
        spans += skipped(link.sample.prompt, link.standing)
        spans.append(link.sample.reply)
    return joined(spans)


def _turns(material: Material, chain: Chain, config: TrainConfig, tools: _Numbers) -> tuple[list[Turn], list[Drift]]:
    turns: list[Turn] = []
    drift: list[Drift] = []
    context = Context.EXACT
    at = 0
    before: Sample | None = None
    pieces = range(0)
    for link in chain.links:
        sample = link.sample
        if before is not None:
            if not _exact(before, link):
                context = Context.RETOKENIZED
            if link.drift is not None:
                drift.append(_drift(turns, pieces, link.drift))
        at += sample.prompt_length - link.standing
        masked = MASKED_BY_DRIFT if chain.mask_drift and context is Context.RETOKENIZED else None
        known = len(turns)
        turns += turns_of(
            sample,
            material.tokens.logprobs(sample.reply),
            at=at,
            context=context,
            tools=None if sample.tools is None else tools.number(sample.tools),
            config=config,
            masked=masked,
        )
        pieces = range(known, len(turns))
        at += sample.reply_length
        before = sample
    return turns, drift


def _drift(turns: list[Turn], pieces: range, drifted: Drifted) -> Drift:
    """`drifted` of the sample whose turns are `pieces`, told of the piece it begins in."""
    place = turns[pieces[0]].start + drifted.position
    turn = max(one for one in pieces if turns[one].start <= place)
    return Drift(turn=turn, position=place - turns[turn].start, sampled=drifted.sampled, canonical=drifted.canonical)


def _exact(before: Sample, link: Link) -> bool:
    """Whether the link's prompt begins with the prompt and the reply of `before`, id for id, and no id is left out."""
    return link.standing == before.end and before.index in link.sample.extends


def _response_messages(chain: Chain) -> list[int]:
    found = [chain.links[0].sample.reply_message]
    before = chain.links[0].sample
    for link in chain.links[1:]:
        # the history's echo of the reply is left out: the reply itself stands there
        found += link.sample.messages[len(before.messages) + 1 :].tolist()
        found.append(link.sample.reply_message)
        before = link.sample
    return found


class _Numbers:
    """Old numbers to new ones, in the order of first use."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}

    def number(self, old: int) -> int:
        return self.used.setdefault(old, len(self.used))

    def spans(self, old: list[int]) -> list[WireSpan]:
        return [WireSpan(start=start, end=end) for start, end in runs(self.number(one) for one in old)]


def _pool(material: Material, packed: Packed, messages: _Numbers, tools: _Numbers) -> Pool:
    return Pool(
        tokens=packed.tokens,
        logprobs=packed.logprobs,
        messages=[material.messages.messages[old] for old in messages.used],
        tools=[material.messages.tools[old] for old in tools.used],
    )


def trained(turns: list[Turn]) -> int:
    """Ids of trainable turns."""
    return int(np.sum([turn.end - turn.start for turn in turns if turn.trainable], dtype=np.int64))
