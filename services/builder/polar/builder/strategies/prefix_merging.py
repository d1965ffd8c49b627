"""`prefix_merging`: one trace per chain of calls (the paper, section 3.4.2).

Notation. A call has a prompt `p` (the ids the engine was given) and a reply `s` (the ids it sampled). A later call with
prompt `q` continues it if

- P1: `q` begins with `p`, and
- P2: what follows in `q` begins with `s`, id for id. Then the trace goes on with the rest of `q` (masked: ends of turns
  that nobody sampled, tool results, the next generation prompt) and its reply, and the context stays `exact`.

Text and back often gives other ids, so P2 fails for a reply that the harness sent back unchanged. If P1 holds, the
messages of `q` are those of `p`, then the reply as captured (`messages.normal`), and the tools are the same, the chain
still goes on, with the sampled ids in the place of their rendering; where the rendering ends, and whether it can be the
same text, is `rendering.find`'s. From there on the trace's context is `retokenized`, with the drift written down.

What the paper leaves open:

- Equal prompts (a retry, a twin, several choices) are siblings, never a break: the one from which the session went on
  continues the chain, the others get traces of their own or are set aside.
- A call that goes on from an earlier turn of a chain starts a new trace, with the shared prefix masked: no sampled id
  is trained twice.
- A sub-agent's, compaction's or side call on top of a chain starts a trace of its own label.
- A call that continues nothing starts a new trace; the chain it would have continued, if it ended there, says why
  (`break_reason`). Nothing is lost either way.

Break reasons: `history_changed`, `tools_changed`, `media_changed`, `rendering_changed` (the messages go on, but the
template renders the older ones otherwise), `no_end_of_turn`, `drift` (where drift breaks), `forked`, `compaction`,
`new_conversation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np

from polar.schemas import BuilderSpec, Label, SetAside

from ..assembly import Chain, Drifted, Link
from ..config import MergingConfig, parse
from ..rendering import find, terminator
from ..samples import Material, Sample
from ..turns import label_of

NEW_CONVERSATION: Final = "new_conversation"


class _Continuation(NamedTuple):
    """Whose chain a sample goes on with, and how much of its prompt that chain stands for."""

    parent: int
    standing: int
    drift: Drifted | None


class _Break(NamedTuple):
    """Why a sample did not go on with `predecessor`."""

    predecessor: int
    reason: str


@dataclass(slots=True)
class _Node:
    """A sample in the tree of continuations."""

    sample: Sample
    label: Label
    continues: _Continuation | None = None
    broke: _Break | None = None
    children: list[int] = field(default_factory=list)


class PrefixMerging:
    version: ClassVar[str] = "1"

    def __init__(self, spec: BuilderSpec) -> None:
        self.config = parse(spec, MergingConfig)

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        nodes = self._tree(material)
        heirs = {index: self._heir(nodes, index) for index in range(len(nodes))}
        retried = {one.sample.completion.retry_of for one in nodes} - {None}
        chains: list[Chain] = []
        chain_of: dict[int, int] = {}
        set_aside: list[SetAside] = []
        for index, node in enumerate(nodes):
            if index in chain_of:
                continue
            reason = self._dropped(nodes, heirs, index, retried)
            if reason is not None:
                set_aside.append(_aside(node.sample, reason))
                continue
            links = [Link(node.sample)]
            chain_of[index] = len(chains)
            heir = heirs[index]
            while heir is not None:
                link = nodes[heir].continues
                assert link is not None
                links.append(Link(nodes[heir].sample, link.standing, link.drift))
                chain_of[heir] = len(chains)
                heir = heirs[heir]
            chains.append(Chain(links, node.label, mask_drift=self.config.on_drift == "mask"))
        _say_why(material, nodes, chains, chain_of)
        return chains, set_aside

    def _tree(self, material: Material) -> list[_Node]:
        nodes: list[_Node] = []
        terminators: set[int] = set()
        for sample in material.samples:
            node = _Node(sample, label_of(sample.completion.hints))
            node.continues, node.broke = self._continuation(material, sample, terminators)
            if node.continues is not None:
                parent = nodes[node.continues.parent]
                parent.children.append(sample.index)
            elif node.broke is None:
                node.broke = _no_continuation(material, sample)
            nodes.append(node)
            end = terminator(sample, material.reply_ids(sample))
            if end is not None:
                terminators.add(end)
        return nodes

    def _continuation(
        self, material: Material, sample: Sample, terminators: set[int]
    ) -> tuple[_Continuation | None, _Break | None]:
        """The longest continuation there is, and why a longer one failed."""
        samples = material.samples
        broke: _Break | None = None
        exact: int | None = None
        for one in sample.extends:
            if _same_media(samples[one], sample):
                exact = one
                break
            broke = broke or _Break(one, "media_changed")
        reach = samples[exact].end if exact is not None else 0
        for one in sample.starts_like:
            before = samples[one]
            if before.prompt_length < reach:
                break
            if one == exact or one in sample.extends or before.prompt_length == sample.prompt_length:
                continue
            found = self._drifted(material, before, sample, terminators)
            if isinstance(found, _Continuation):
                return found, None
            if found is not None and broke is None:
                broke = _Break(one, found)
        if exact is None:
            return None, broke
        return _Continuation(exact, reach, None), broke

    def _drifted(
        self, material: Material, before: Sample, sample: Sample, terminators: set[int]
    ) -> _Continuation | str | None:
        """The continuation of `before` by `sample` where P1 holds and P2 does not, or why there is none."""
        if not _messages_begin_with(sample, before) or len(sample.normals) == len(before.normals):
            return None
        if int(sample.normals[len(before.normals)]) != before.reply_normal:
            return "history_changed"
        if sample.tools_key != before.tools_key:
            return "tools_changed"
        if not _same_media(before, sample):
            return "media_changed"
        if self.config.on_drift == "break":
            return "drift"
        whole = material.prompt_ids(sample)
        prompt, rest = whole[: before.prompt_length], whole[before.prompt_length :]
        found = find(before, prompt, material.reply_ids(before), rest, terminators)
        if isinstance(found, str):
            return found
        return _Continuation(before.index, before.prompt_length + found.length, found.drift)

    def _heir(self, nodes: list[_Node], index: int) -> int | None:
        """The child that goes on with the node's chain: of the first prompt's replies, the one gone on with."""
        own = [child for child in nodes[index].children if nodes[child].label is nodes[index].label]
        if not own:
            return None
        first = nodes[own[0]].sample
        twins = [child for child in own if _same_prompt(nodes[child].sample, first)]
        return next((child for child in twins if nodes[child].children), twins[0])

    def _dropped(
        self, nodes: list[_Node], heirs: dict[int, int | None], index: int, retried: set[str | None]
    ) -> str | None:
        """Why the node gets no trace of its own; None: it does."""
        node = nodes[index]
        if node.children:
            return None
        if node.sample.completion.completion_id in retried:
            return "retry"
        if self.config.siblings == "trace":
            return None
        if node.continues is not None:
            heir = heirs[node.continues.parent]
            lost = heir is not None and heir != index and _same_prompt(nodes[heir].sample, node.sample)
            return "sibling" if lost else None
        roots = [one for one in nodes if one.continues is None and _same_prompt(one.sample, node.sample)]
        kept = next((one for one in roots if one.children), roots[0])
        return None if kept is node else "sibling"


def _say_why(material: Material, nodes: list[_Node], chains: list[Chain], chain_of: dict[int, int]) -> None:
    """Gives each chain that ended the reason for which the first later call did not go on with it."""
    for index, node in enumerate(nodes):
        if index not in chain_of or chains[chain_of[index]].links[0].sample is not node.sample:
            continue  # set aside, or goes on with its chain
        for broke in _reasons(material, nodes, node):
            chain = chains[chain_of[broke.predecessor]] if broke.predecessor in chain_of else None
            if chain is None or chain is chains[chain_of[index]] or chain.links[-1].sample.index >= index:
                continue  # it went on later: nothing broke it
            if node.label is not chain.label and node.label is not Label.COMPACTION:
                continue  # what a sub-agent or a side call does ends no other conversation
            if chain.break_reason in (None, NEW_CONVERSATION):
                chain.break_reason = broke.reason
                break


def _reasons(material: Material, nodes: list[_Node], node: _Node) -> list[_Break]:
    found = [node.broke] if node.broke is not None else []
    if node.continues is not None:
        parent = nodes[node.continues.parent]
        twin = any(_same_prompt(nodes[one].sample, node.sample) for one in parent.children if nodes[one] is not node)
        if node.label is not parent.label:
            found.append(_Break(parent.sample.index, str(node.label)))
        elif not twin:
            # where its messages go on from a later turn than its ids do, that turn's chain is the one that broke
            later = _no_continuation(material, node.sample)
            if later is None or later.predecessor <= parent.sample.index or later.reason == NEW_CONVERSATION:
                later = _Break(parent.sample.index, "forked")
            found.append(later)
    return found


def _no_continuation(material: Material, sample: Sample) -> _Break | None:
    """Whom a sample that continues nothing comes after, judged by messages, and what differs."""
    if sample.index == 0:
        return None
    best: Sample | None = None
    related: Sample | None = None
    for before in reversed(material.samples[: sample.index]):
        if _same_prompt(before, sample):
            return None  # a sibling at the start of a conversation
        if _messages_begin_with(sample, before) and (best is None or len(before.normals) > len(best.normals)):
            best = before
        if related is None and _opening(material, before) == _opening(material, sample):
            related = before
    if best is not None and len(best.normals):
        if best.tools_key != sample.tools_key:
            return _Break(best.index, "tools_changed")
        at = len(best.normals)
        unchanged = len(sample.normals) > at and int(sample.normals[at]) == best.reply_normal
        return _Break(best.index, "rendering_changed" if unchanged else "history_changed")
    if related is not None:
        return _Break(related.index, "history_changed")
    return _Break(sample.index - 1, NEW_CONVERSATION)


def _messages_begin_with(sample: Sample, before: Sample) -> bool:
    length = len(before.normals)
    return len(sample.normals) >= length and np.array_equal(sample.normals[:length], before.normals)


def _opening(material: Material, sample: Sample) -> int:
    """Normal form of the first message that is not an instruction of the harness; its own number if there is none."""
    for number, form in zip(sample.messages.tolist(), sample.normals.tolist(), strict=True):
        if material.messages.messages[number].get("role") not in ("system", "developer"):
            return int(form)
    return -1 - sample.index


def _same_prompt(one: Sample, other: Sample) -> bool:
    """Equal prompts, id for id, with the same media."""
    if one.prompt_length != other.prompt_length or one.media != other.media:
        return False
    if one.completion.completion_id == other.completion.completion_id:
        return True
    return one.index in other.starts_like or other.index in one.starts_like


def _same_media(before: Sample, sample: Sample) -> bool:
    """Whether the media within the prompt of `before` are the same in `sample`."""
    inside = [one for one in sample.media if one.offset < before.prompt_length]
    return inside == list(before.media)


def _aside(sample: Sample, reason: str) -> SetAside:
    several = f"choice {sample.choice.index}" if sample.choice.index else None
    return SetAside(
        completion_id=sample.completion.completion_id, reason=reason, attempt=sample.completion.attempt, detail=several
    )
