"""Strategies as a user might write them, good and bad."""

from __future__ import annotations

from typing import ClassVar

from polar.builder.assembly import Chain, Link
from polar.builder.config import TrainConfig, parse
from polar.builder.samples import Material
from polar.schemas import BuilderSpec, SetAside


class Reversed:
    version: ClassVar[str] = "own-1"

    def __init__(self, spec: BuilderSpec) -> None:
        self.config = parse(spec, TrainConfig)

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        return [Chain([Link(one)]) for one in reversed(material.samples)], []


class Raises(Reversed):
    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        raise KeyError("oops")


class Loses(Reversed):
    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        return [], []


class Doubles(Reversed):
    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        return [Chain([Link(one)]) for one in [*material.samples, *material.samples]], []
