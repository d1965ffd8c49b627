"""What the suites over all CLIs share: which are installed, and a box for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.adapters import ADAPTERS, Adapter, program
from tests.harness.place import Place
from tests.proxy.harness import Door


def missing(cli: Adapter) -> str:
    """Why it cannot run here, or ""."""
    return "" if program(cli) else f"needs {cli.name} {cli.version}: {cli.variable}"


needs_some = pytest.mark.skipif(
    all(missing(cli) for cli in ADAPTERS), reason="; ".join(missing(cli) for cli in ADAPTERS if missing(cli))
)
"""For a test that runs all of them at the same time."""


def each_cli(*, but: str = "") -> list[Any]:
    """A parameter per CLI; one that is not installed is skipped by its name."""
    return [
        pytest.param(cli, id=cli.name, marks=pytest.mark.skipif(bool(missing(cli)), reason=missing(cli)))
        for cli in ADAPTERS
        if cli.name != but
    ]


async def place_for(cli: Adapter, door: Door, places: Callable[..., Any], **options: Any) -> Place:
    """A box that sees the program and what it needs."""
    found = program(cli)
    assert found is not None
    place: Place = await places(door, read_only=found.folders, path=found.search, **options)
    return place


def installed() -> list[Adapter]:
    return [cli for cli in ADAPTERS if not missing(cli)]


def name_missing() -> None:
    """At the end of such a test: what was not run is named."""
    if absent := [missing(cli) for cli in ADAPTERS if missing(cli)]:
        pytest.skip(f"passed without some: {'; '.join(absent)}")
