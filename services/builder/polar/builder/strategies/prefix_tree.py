"""`prefix_tree`: exact traces as branches of a tree, for trainers that compute a shared prefix once.

Two calls are joined only where the later prompt begins with the earlier prompt and reply, id for id. So every context
is exact; where a history drifts, forks, is retried or is compacted the next trace branches off, and `Trace.shares`
names the earlier trace and how many ids both begin with. Laid out as a tree (attention over ancestors only), a session
then costs its distinct ids, each sampled id trains once, and no trained id has a context that the engine did not have:
what `per_request` promises at the price of `prefix_merging`. A trainer that knows no trees reads the traces as they
are.

The parent is the earlier trace with which the trace's prompt begins longest alike. Traces come in the order of their
first calls, so a parent stands before its branches.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import ClassVar

from polar.schemas import BuilderSpec, SetAside

from ..assembly import Chain, Link
from ..config import TreeConfig, parse
from ..labels import labels
from ..pool import shared
from ..samples import Material, Sample
from .lineage import apart


class PrefixTree:
    version: ClassVar[str] = "1"

    def __init__(self, spec: BuilderSpec) -> None:
        self.config = parse(spec, TreeConfig)

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        told = labels(material, structure=self.config.label_by == "structure")
        samples = material.samples
        chains: list[Chain] = []
        chain_of: list[int] = []
        prompts = _Prompts()
        for sample in samples:
            parent = next((one for one in sample.extends if apart(samples[one], sample) is None), None)
            chain = None if parent is None else chains[chain_of[parent]]
            if (
                chain is not None
                and parent is not None
                and chain.links[-1].sample is samples[parent]
                and chain.label is told[sample.index].label
            ):
                chain.links.append(Link(sample, samples[parent].end))
                chain_of.append(chain_of[parent])
            else:
                branch_of = prompts.nearest(sample, parent, samples)
                chain_of.append(len(chains))
                branch = None if branch_of is None else chain_of[branch_of]
                chains.append(Chain([Link(sample)], *told[sample.index], branch_of=branch))
            prompts.add(sample)
        return chains, []


class _Prompts:
    """Prompts in the order of the places their ids have in the pool: neighbours are those that begin longest alike."""

    def __init__(self) -> None:
        self._sorted: list[tuple[tuple[tuple[int, int], ...], int]] = []

    def add(self, sample: Sample) -> None:
        insort(self._sorted, (tuple(sample.prompt), sample.index))

    def nearest(self, sample: Sample, parent: int | None, samples: list[Sample]) -> int | None:
        """The sample whose trace a prompt branches off; `parent`: one whose prompt and reply it begins with."""
        best, length = parent, 0 if parent is None else samples[parent].end
        at = bisect_right(self._sorted, (tuple(sample.prompt), -1))
        for prompt, index in self._sorted[max(0, at - 1) : at + 1]:
            alike = shared(prompt, sample.prompt)
            if alike > length:
                best, length = index, alike
        return best
