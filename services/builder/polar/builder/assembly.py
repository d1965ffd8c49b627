"""From a strategy's chains to a trajectory's traces.

A strategy only says which samples follow each other; everything a trainer relies on is made here, the same for every
strategy: ids come from the pool, mask 1 can stand on sampled ids only, `exact` is claimed only where the pool shows, id
for id, that the context before a sampled turn is the one the engine had, and what a length limit leaves out is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from polar.schemas import Context, Drift, Label, MediaPart, Pool, SetAside, Shared, Trace, Turn
from polar.schemas import Span as WireSpan
from polar.schemas.ids import derived

from .config import TrainConfig
from .messages import runs
from .pool import Packed, Span, joined, shared, skipped, taken
from .samples import Material, Sample
from .turns import cut_at, turns_of

MASKED_BY_DRIFT: Final = "retokenized"
TOO_LONG: Final = "max_tokens"


class Drifted(NamedTuple):
    """A stretch of a reply that a later prompt renders as other ids."""

    position: int
    """Its first id, from the reply's start; negative: in the generation prompt before it."""
    sampled: int
    canonical: int


@dataclass(slots=True)
class Link:
    """A sample in a chain."""

    sample: Sample
    standing: int = 0
    """The first so many ids of its prompt are stood for by what the chain holds already; 0 in the first link."""
    drift: tuple[Drifted, ...] = ()
    """How its prompt renders the reply before it, where not as sampled."""


@dataclass(slots=True)
class Chain:
    """A trace to be: its first sample's prompt whole, then replies and what was given between them."""

    links: list[Link]
    label: Label = Label.MAIN
    label_by: str = ""
    """What showed it."""
    break_reason: str | None = None
    break_detail: str | None = None
    mask_drift: bool = False
    """Mask the turns whose context is retokenized."""
    branch_of: int | None = None
    """The place, among the chains, of an earlier one with which it begins alike, where a trainer is to be told."""
    metadata: dict[str, str] = field(default_factory=dict)


class Assembled(NamedTuple):
    pool: Pool
    traces: list[Trace]
    set_aside: list[SetAside]
    """Samples that no trace has room for."""


def assemble(material: Material, chains: list[Chain], config: TrainConfig, trajectory_id: str) -> Assembled:
    """Pool and traces, in the order of `chains`. Deterministic."""
    fitted = [_fit(chain, config.max_tokens_per_trace) for chain in chains]
    kept = {place: number for number, place in enumerate(i for i, one in enumerate(fitted) if one.links)}
    segments = [_segments(one) for one in fitted]
    packed = material.tokens.pack([span for one in segments for span in one])
    messages = _Numbers(len(material.messages.messages))
    tools = _Numbers(len(material.messages.tools))
    traces = []
    for place in kept:
        chain, fit, spans = chains[place], fitted[place], segments[place]
        first = fit.links[0].sample
        turns, drift = _turns(material, chain, fit.links, config, tools)
        if fit.cut:
            turns = cut_at(turns, fit.length)
        trainable = chain.label in config.train_labels
        rewarded = chain.label in (config.train_labels if config.reward_labels is None else config.reward_labels)
        traces.append(
            Trace(
                trace_id=derived("trace", trajectory_id, first.completion.completion_id, first.choice.index),
                segments=packed.spans(spans),
                prompt_length=first.prompt_length,
                turns=turns,
                label=chain.label,
                label_by=chain.label_by,
                trainable=trainable,
                rewarded=None if rewarded is trainable else rewarded,
                prompt_messages=messages.spans(first.messages),
                response_messages=messages.spans(np.array(_response_messages(fit.links), np.int32)),
                policy_versions=list(dict.fromkeys(span.version for turn in turns for span in turn.policy)),
                media=_media(fit.links),
                drift=drift,
                break_reason=TOO_LONG if fit.cut else chain.break_reason,
                break_detail=None if fit.cut else chain.break_detail,
                cut=fit.cut,
                shares=_shares(chain, kept, segments, spans),
                metadata=dict(chain.metadata),
            )
        )
    aside = [_too_long(one, config.max_tokens_per_trace) for fit in fitted for one in fit.dropped]
    return Assembled(_pool(material, packed, messages, tools), traces, aside)


class _Fitted(NamedTuple):
    """As much of a chain as a trace may hold."""

    links: list[Link]
    length: int
    """Ids of the trace; it ends with a sampled one."""
    cut: int
    dropped: list[Sample]


def _fit(chain: Chain, limit: int | None) -> _Fitted:
    at, kept, length = 0, 0, 0
    for link in chain.links:
        at += link.sample.prompt_length - link.standing
        if limit is None or at < limit:
            kept += 1
            length = at + link.sample.reply_length
        at += link.sample.reply_length
    length = length if limit is None else min(length, limit)
    return _Fitted(chain.links[:kept], length, at - length, [link.sample for link in chain.links[kept:]])


def _too_long(sample: Sample, limit: int | None) -> SetAside:
    return SetAside(
        completion_id=sample.completion.completion_id,
        reason=TOO_LONG,
        attempt=sample.completion.attempt,
        detail=f"its trace has {limit} ids before it begins; see builder.config.max_tokens_per_trace",
    )


def _segments(fit: _Fitted) -> list[Span]:
    if not fit.links:
        return []
    first = fit.links[0].sample
    spans = [first.reply]
    for link in fit.links[1:]:
        spans += skipped(link.sample.prompt, link.standing)
        spans.append(link.sample.reply)
    found = joined(spans, first.prompt)
    return taken(found, fit.length) if fit.cut else found


def _shares(chain: Chain, kept: dict[int, int], segments: list[list[Span]], spans: list[Span]) -> Shared | None:
    if chain.branch_of is None or chain.branch_of not in kept:
        return None
    length = shared(segments[chain.branch_of], spans)
    return Shared(trace=kept[chain.branch_of], length=length) if length else None


def _turns(
    material: Material, chain: Chain, links: list[Link], config: TrainConfig, tools: _Numbers
) -> tuple[list[Turn], list[Drift]]:
    turns: list[Turn] = []
    drift: list[Drift] = []
    context = Context.EXACT
    at = 0
    before: Sample | None = None
    pieces = range(0)
    for link in links:
        sample = link.sample
        if before is not None:
            if not _exact(before, link):
                context = Context.RETOKENIZED
            drift += (_drift(turns, pieces, one) for one in link.drift)
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
    turn = max((one for one in pieces if turns[one].start <= place), default=pieces[0])
    return Drift(turn=turn, position=place - turns[turn].start, sampled=drifted.sampled, canonical=drifted.canonical)


def _exact(before: Sample, link: Link) -> bool:
    """Whether the link's prompt begins with the prompt and the reply of `before`, id for id, and no id is left out."""
    return link.standing == before.end and before.index in link.sample.extends


def _response_messages(links: list[Link]) -> list[int]:
    before = links[0].sample
    found = [before.reply_message]
    for link in links[1:]:
        known = len(before.messages)
        if len(link.sample.normals) > known and int(link.sample.normals[known]) != before.reply_normal:
            # the ids are the same, the message is not (a client that joined a cut reply and its end): as it was shown
            found[-1] = int(link.sample.messages[known])
        # the history's echo of the reply is left out: the reply itself stands there
        found += link.sample.messages[known + 1 :].tolist()
        found.append(link.sample.reply_message)
        before = link.sample
    return found


def _media(links: list[Link]) -> list[MediaPart]:
    """Media by their place in the trace."""
    found = list(links[0].sample.media)
    at = links[0].sample.end
    for link in links[1:]:
        sample = link.sample
        for one in sample.media[len(found) :]:
            place = one.offset if one.offset < 0 else one.offset + at - link.standing
            found.append(msgspec.structs.replace(one, offset=place))
        at += sample.end - link.standing
    return found


class _Numbers:
    """Old numbers to new ones, in the order of first use."""

    def __init__(self, count: int) -> None:
        """`count`: of old numbers."""
        self.used: list[int] = []
        self._new = np.full(count, -1, np.int32)

    def number(self, old: int) -> int:
        if self._new[old] < 0:
            self._new[old] = len(self.used)
            self.used.append(old)
        return int(self._new[old])

    def spans(self, old: npt.NDArray[np.int32]) -> list[WireSpan]:
        new = self._new[old]
        if (new < 0).any():
            for one in old[new < 0].tolist():
                self.number(one)
            new = self._new[old]
        return [WireSpan(start=start, end=end) for start, end in runs(new)]


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
