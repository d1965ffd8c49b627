"""Who continues whom, as far as strategies that merge agree on it, and why a chain ends where it does.

Break reasons, each of the chain that ended:

- `history_changed`: the later history does not show what was sampled: the client rewrote it, or the template left
  thinking or calls out of it, or it ended inside a character, which text cannot hold (`break_detail`: `client`,
  `template`, `bytes`);
- `tools_changed`, `media_changed`, `model_changed`: the messages go on under other tools, images or another model;
- `no_end_of_turn`: nothing in the session shows where the rendering of a cut reply ends;
- `drift`: a merge that `on_drift: break` does not want;
- `forked`: the later call goes on from an earlier turn of the chain;
- `compaction`: the chain was summed up, and goes on in a new trace;
- `new_conversation`: what came next has nothing to do with it.

Candidates are found by numbers of conversations (`MessagePool.path`), so that a call costs its messages, not its
session's calls. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Final, NamedTuple

from polar.schemas import Label

from ..assembly import Chain, Drifted
from ..labels import Labelled
from ..rendering import HISTORY, Ends, decodable, trimmed
from ..samples import Material, Sample
from ..texts import TextOf

NEW_CONVERSATION: Final = "new_conversation"


class Continuation(NamedTuple):
    """Whose chain a sample goes on with, and how much of its prompt that chain stands for."""

    parent: int
    standing: int
    drift: tuple[Drifted, ...]


class Break(NamedTuple):
    """Why a sample did not go on with `predecessor`."""

    predecessor: int
    reason: str
    detail: str | None = None


@dataclass(slots=True)
class Node:
    """A sample in the tree of continuations."""

    sample: Sample
    told: Labelled
    continues: Continuation | None = None
    broke: Break | None = None
    children: list[int] = field(default_factory=list)


class Seen:
    """The samples so far, by what their messages say."""

    def __init__(self, material: Material, ends: Ends, text_of: TextOf | None) -> None:
        self.material = material
        self.ends = ends
        self.text_of = text_of
        self._by_prompt: dict[int, list[int]] = {}
        self._by_reply: dict[int, list[int]] = {}
        self._by_place: dict[int, int] = {}
        """The first sample of each prompt."""
        self._by_opening: dict[int, list[int]] = {}

    def add(self, sample: Sample) -> None:
        self._by_prompt.setdefault(sample.path, []).append(sample.index)
        self._by_reply.setdefault(sample.said, []).append(sample.index)
        self._by_place.setdefault(sample.place, sample.index)
        self._by_opening.setdefault(self._opening(sample), []).append(sample.index)

    def candidates(self, sample: Sample) -> Iterator[int]:
        """Whom a sample may continue, the longest conversation first.

        By messages; where text can be compared, also by ids alone, whatever the messages say.
        """
        samples = self.material.samples
        by_ids = sample.starts_like if self.text_of is not None else ()
        said = (one for path in sample.conversations() for one in self._by_reply.get(path, ()))
        told: set[int] = set()
        for one in merge(said, by_ids, key=lambda one: (-samples[one].prompt_length, one)) if by_ids else said:
            if one not in told:
                told.add(one)
                yield one

    def not_continued(self, sample: Sample) -> Break | None:
        """Whom a sample that continues nothing comes after, and what differs."""
        samples = self.material.samples
        if sample.index == 0 or sample.index > self._by_place.get(sample.place, sample.index):
            return None  # a sibling at the start of a conversation
        for path in sample.conversations():
            last = _last_before(sample.index, self._by_prompt.get(path, ()))
            if last is not None:
                before = samples[last]
                if before.tools_key != sample.tools_key:
                    return Break(before.index, "tools_changed")
                return self.changed(before, sample)
        related = _last_before(sample.index, self._by_opening.get(self._opening(sample), ()))
        if related is not None:
            return Break(related, HISTORY, "client")
        return Break(sample.index - 1, NEW_CONVERSATION)

    def changed(self, before: Sample, sample: Sample) -> Break:
        """The history is another, and what changed it: where the messages go on, not the client."""
        if before.said not in sample.paths or trimmed(self.material, before, sample).text:
            return Break(before.index, HISTORY, "client")
        return Break(before.index, HISTORY, "template" if decodable(before) else "bytes")

    def _opening(self, sample: Sample) -> int:
        """Normal form of the first message that is not an instruction of the harness; its own if there is none."""
        messages = self.material.messages.messages
        for at in range(len(sample.messages)):
            if messages[sample.messages[at]].get("role") not in ("system", "developer"):
                return int(sample.normals[at])
        return -1 - sample.index


def _last_before(index: int, found: Sequence[int]) -> int | None:
    """The last of ascending numbers that is less than `index`."""
    at = bisect_left(found, index)
    return found[at - 1] if at else None


def same_prompt(one: Sample, other: Sample) -> bool:
    """Equal prompts, id for id, with the same media."""
    return one.place == other.place and one.media == other.media


def apart(before: Sample, sample: Sample) -> str | None:
    """Why a call cannot go on with another whatever its ids are."""
    if before.engine != sample.engine:
        return "model_changed"
    if any(one.offset < 0 for one in (*before.media, *sample.media)):
        # places are not known: the same, in the same order
        told = [(one.kind, one.sha256) for one in sample.media[: len(before.media)]]
        return None if told == [(one.kind, one.sha256) for one in before.media] else "media_changed"
    inside = tuple(one for one in sample.media if one.offset < before.prompt_length)
    return None if inside == before.media else "media_changed"


def say_why(seen: Seen, nodes: list[Node], chains: list[Chain], chain_of: dict[int, int]) -> None:
    """Gives each chain that ended the reason for which the first later call did not go on with it."""
    for index, node in enumerate(nodes):
        if index not in chain_of:
            continue  # set aside
        begins = chains[chain_of[index]].links[0].sample is node.sample
        for broke in _reasons(seen, nodes, node) if begins else filter(None, [node.broke]):
            chain = chains[chain_of[broke.predecessor]] if broke.predecessor in chain_of else None
            if chain is None or chain is chains[chain_of[index]] or chain.links[-1].sample.index >= index:
                continue  # it went on later: nothing broke it
            if node.told.label is not chain.label:
                if node.told.label is not Label.COMPACTION:
                    continue  # what a sub-agent or a side call does ends no other conversation
                # whatever its prompt differs in (it may have no tools), what comes after it starts from its summary
                broke = Break(broke.predecessor, str(Label.COMPACTION))
            if chain.break_reason in (None, NEW_CONVERSATION):
                chain.break_reason, chain.break_detail = broke.reason, broke.detail
                break


def _reasons(seen: Seen, nodes: list[Node], node: Node) -> list[Break]:
    found = [node.broke] if node.broke is not None else []
    if node.continues is None:
        found = [*_after_compaction(nodes, node), *found]
    else:
        parent = nodes[node.continues.parent]
        twin = any(same_prompt(nodes[one].sample, node.sample) for one in parent.children if nodes[one] is not node)
        if node.told.label is not parent.told.label:
            found.append(Break(parent.sample.index, str(node.told.label)))
        elif not twin:
            # where its messages go on from a later turn than its ids do, that turn's chain is the one that broke
            later = seen.not_continued(node.sample)
            if later is None or later.predecessor <= parent.sample.index or later.reason == NEW_CONVERSATION:
                later = Break(parent.sample.index, "forked")
            found.append(later)
    return found


def _after_compaction(nodes: list[Node], node: Node) -> list[Break]:
    """The last call of the node's own kind, if the conversation was summed up between the two."""
    between = False
    for before in reversed(nodes[: node.sample.index]):
        if before.told.label is node.told.label:
            return [Break(before.sample.index, str(Label.COMPACTION))] if between else []
        between = between or before.told.label is Label.COMPACTION
    return []
