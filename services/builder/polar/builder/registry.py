"""Builder strategies by name, loaded when first wanted.

Built in: `prefix_merging`, `per_request` and `prefix_tree`. One's own: an entry point of group `polar.builders`, or
`module:Class`; either only if the operator allows it by name (`POLAR_BUILDER_ALLOW`), since a task may come from
anyone.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import ClassVar, Final, Protocol

from polar.schemas import BuilderSpec, SetAside

from .assembly import Chain
from .config import TrainConfig
from .samples import Material

GROUP: Final = "polar.builders"
BUILT_IN: Final = {
    "prefix_merging": "polar.builder.strategies.prefix_merging:PrefixMerging",
    "per_request": "polar.builder.strategies.per_request:PerRequest",
    "prefix_tree": "polar.builder.strategies.prefix_tree:PrefixTree",
}


class Strategy(Protocol):
    """Decides which samples form a trace; deterministic, without I/O."""

    version: ClassVar[str]
    """Changes when the same records would give another trajectory."""
    config: TrainConfig

    def __init__(self, spec: BuilderSpec) -> None:
        """Raises `ConfigWrong` when `spec.config` does not fit."""

    def chains(self, material: Material) -> tuple[list[Chain], list[SetAside]]:
        """Chains, and the samples it left out. A completion that is in neither is an error of the strategy."""


class UnknownStrategy(LookupError):
    """No such strategy here, or not allowed; says what to do."""


def load(name: str, allowed: Collection[str] = ()) -> type[Strategy]:
    """The strategy class of `name`.

    Raises:
        UnknownStrategy: not known, not allowed or not importable.
    """
    target = BUILT_IN.get(name)
    if target is None:
        if name not in allowed:
            known = ", ".join([*BUILT_IN, *sorted(allowed)])
            raise UnknownStrategy(
                f"no builder {name!r} is allowed here; known: {known} (POLAR_BUILDER_ALLOW adds more)"
            )
        target = name if ":" in name else _entry_point(name)
    module, _, attribute = target.partition(":")
    try:
        found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownStrategy(f"builder {name!r} cannot be loaded from {target}: {error}") from error
    return found


def _entry_point(name: str) -> str:
    for one in entry_points(group=GROUP, name=name):
        return one.value
    raise UnknownStrategy(f"builder {name!r} is allowed, but no installed package offers it under {GROUP!r}")
