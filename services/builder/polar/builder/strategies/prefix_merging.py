"""`prefix_merging`: one trace per chain of calls (the paper, section 3.4.2).

Notation. A call has a prompt `p` (the ids the engine was given) and a reply `s` (the ids it sampled). A later call with
prompt `q` continues it if

- P1: `q` begins with `p`, and
- P2: what follows in `q` begins with `s`, id for id. Then the trace goes on with the rest of `q` (masked: ends of turns
  that nobody sampled, tool results, the next generation prompt) and its reply, and the context stays `exact`.

Text and back often gives other ids, so P2 fails for a reply that the harness sent back unchanged, and a generation
prompt that no history shows makes P1 fail at its end. Candidates are then found by a key of messages: those of `q`
begin with those of `p` and the reply, all in normal form (`polar.schemas.messages`), under the same tools. Such a step
merges, with the sampled ids in the place of their rendering, only where both are the same text: that is
`rendering.find`'s to say. From there on the trace's context is `retokenized`, with the drift written down.

What the paper leaves open:

- Equal prompts (a retry, a twin, several choices) are siblings, never a break: the one from which the session went on
  continues the chain, the others get traces of their own or are set aside.
- A call that goes on from an earlier turn of a chain starts a new trace, with the shared prefix masked: no sampled id
  is trained twice.
- A sub-agent's, compaction's or side call on top of a chain starts a trace of its own label.
- A call that continues nothing starts a new trace; the chain it would have continued, if it ended there, says why
  (`break_reason`, see `lineage`). Nothing is lost either way.
"""

from __future__ import annotations

from typing import ClassVar, Final

from polar.schemas import BuilderSpec, SetAside

from ..assembly import Chain, Link
from ..config import MergingConfig, parse
from ..labels import labels
from ..rendering import HISTORY, Ends, find
from ..samples import Material, Sample
from .lineage import Break, Continuation, Node, Seen, apart, same_prompt, say_why

TRIES: Final = 4
"""Earlier turns whose text a prompt is compared with: where it shows none of the last ones it will show none before."""


class PrefixMerging:
    version: ClassVar[str] = "3"

    def __init__(self, spec: BuilderSpec) -> None:
        self.config = parse(spec, MergingConfig)

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        text_of = None if self.config.tokenizer is None else material.tokenizers.find(self.config.tokenizer)
        seen = Seen(material, Ends(material), text_of)
        nodes = self._tree(material, seen)
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
            chains.append(Chain(links, *node.told, mask_drift=self.config.on_drift == "mask"))
        say_why(seen, nodes, chains, chain_of)
        return chains, set_aside

    def _tree(self, material: Material, seen: Seen) -> list[Node]:
        told = labels(material, structure=self.config.label_by == "structure")
        nodes: list[Node] = []
        for sample in material.samples:
            node = Node(sample, told[sample.index])
            node.continues, node.broke = self._continuation(seen, sample)
            if node.continues is not None:
                nodes[node.continues.parent].children.append(sample.index)
            elif node.broke is None:
                node.broke = seen.not_continued(sample)
            nodes.append(node)
            seen.add(sample)
        return nodes

    def _continuation(self, seen: Seen, sample: Sample) -> tuple[Continuation | None, Break | None]:
        """The longest continuation there is, and why a longer one failed."""
        samples = seen.material.samples
        broke: Break | None = None
        exact: int | None = None
        for one in sample.extends:
            why = apart(samples[one], sample)
            if why is None:
                exact = one
                break
            broke = broke or Break(one, why)
        reach = samples[exact].end if exact is not None else 0
        tries = TRIES
        for one in seen.candidates(sample):
            before = samples[one]
            if before.prompt_length < reach or not tries:
                break
            if one in sample.extends or same_prompt(before, sample):
                continue
            found = self._drifted(seen, before, sample)
            if isinstance(found, Continuation):
                return found, broke
            broke = broke or found
            tries -= 1
        if exact is None:
            return None, broke
        return Continuation(exact, reach, ()), broke

    def _drifted(self, seen: Seen, before: Sample, sample: Sample) -> Continuation | Break:
        """The continuation of `before` by `sample` where P1 and P2 do not both hold, or why there is none."""
        if before.tools_key != sample.tools_key:
            return Break(before.index, "tools_changed")
        why = apart(before, sample)
        if why is not None:
            return Break(before.index, why)
        found = find(seen.material, before, sample, seen.ends, seen.text_of)
        if isinstance(found, str):
            return seen.changed(before, sample) if found == HISTORY else Break(before.index, found)
        if self.config.on_drift == "break":
            return Break(before.index, "drift")
        return Continuation(before.index, found.standing, found.drift)

    def _heir(self, nodes: list[Node], index: int) -> int | None:
        """The child that goes on with the node's chain: the first whose own reply was gone on with, else the first."""
        own = [child for child in nodes[index].children if nodes[child].told.label is nodes[index].told.label]
        return next((child for child in own if nodes[child].children), own[0]) if own else None

    def _dropped(
        self, nodes: list[Node], heirs: dict[int, int | None], index: int, retried: set[str | None]
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
            lost = heir is not None and heir != index and same_prompt(nodes[heir].sample, node.sample)
            return "sibling" if lost else None
        roots = [one for one in nodes if one.continues is None and same_prompt(one.sample, node.sample)]
        kept = next((one for one in roots if one.children), roots[0])
        return None if kept is node else "sibling"


def _aside(sample: Sample, reason: str) -> SetAside:
    several = f"choice {sample.choice.index}" if sample.choice.index else None
    return SetAside(
        completion_id=sample.completion.completion_id, reason=reason, attempt=sample.completion.attempt, detail=several
    )
