"""`per_request`: one trace per sampled reply, its prompt masked.

The plainest reading of a session: every context is exact, since nothing is joined. Prompts share the pool, so it costs
about what merging costs.
"""

from __future__ import annotations

from typing import ClassVar

from polar.schemas import BuilderSpec, SetAside

from ..assembly import Chain, Link
from ..config import PerRequestConfig, parse
from ..labels import labels
from ..samples import Material


class PerRequest:
    version: ClassVar[str] = "2"

    def __init__(self, spec: BuilderSpec) -> None:
        self.config = parse(spec, PerRequestConfig)

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        told = labels(material, structure=self.config.label_by == "structure")
        return [Chain([Link(one)], *label) for one, label in zip(material.samples, told, strict=True)], []
