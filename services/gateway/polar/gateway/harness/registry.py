"""Which adapter a name means; the module is imported when a session needs it.

The names are those of `polar.schemas.catalog`. An adapter of one's own (`import_path`) is loaded only where the
operator's settings name it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import cast

from polar.schemas import AgentSpec
from polar.schemas.catalog import HARNESSES

from .interface import Harness, HarnessRefused

ADAPTERS: Mapping[str, str] = MappingProxyType({"shell": "polar.gateway.harness.shell:ShellHarness"})


def load_harness(agent: AgentSpec, allowed: Collection[str] = ()) -> Harness:
    """The adapter that a task asks for. `allowed`: the import paths that this node loads.

    Raises:
        HarnessRefused: no such adapter here.
    """
    if agent.import_path is not None:
        if agent.import_path not in allowed:
            raise HarnessRefused(
                f"`{agent.import_path}` is not among this gateway's import paths (POLAR_GATEWAY_IMPORT_PATHS)"
            )
        return _load(agent.import_path)
    entry = HARNESSES.resolve(agent.harness or "")
    path = ADAPTERS.get(entry.name) if entry is not None else None
    if path is None:
        raise HarnessRefused(f"harness `{agent.harness}` is not part of this gateway; it has {', '.join(ADAPTERS)}")
    return _load(path)


def _load(path: str) -> Harness:
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        return cast(Harness, kind())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise HarnessRefused(f"harness adapter {path!r} cannot be loaded: {error}") from error
