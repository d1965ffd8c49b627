"""Backends for the conformance suite: a new backend adds one line to `CASES` and its reason to skip."""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from polar.runtime import Box, BoxSpec, Door, Runtime, create_runtime

CASES = [
    pytest.param("local", id="local", marks=pytest.mark.sandbox),
    pytest.param("local-unsafe", id="local-unsafe"),
]


@functools.cache
def why_not(name: str) -> str:
    """The probe's reason that a backend cannot run here, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        runtime = create_runtime(name, {"root": folder, "allow_unsafe_local": True})
        probe = asyncio.run(runtime.probe())
    return "" if probe.ok else f"{name}: {probe.reason} ({probe.hint})"


@dataclass
class Place:
    """One backend with a root of its own; makes boxes and destroys them at the end."""

    name: str
    settings: dict[str, Any]
    runtime: Runtime

    async def again(self) -> Runtime:
        """The backend as a restarted node has it: another object over the same root."""
        return await asyncio.to_thread(create_runtime, self.name, self.settings)  # it imports and looks at the disk

    async def box(self, door: Door | None = None, **spec: Any) -> Box:
        return await self.runtime.create(BoxSpec(box_id=str(uuid.uuid4()), **spec), door)

    def needs(self, capability: str) -> None:
        if not getattr(self.runtime.capabilities, capability):
            pytest.skip(f"{self.name} has not the capability {capability} on this machine")


@pytest.fixture(params=CASES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    name = request.param
    if reason := await asyncio.to_thread(why_not, name):
        pytest.skip(reason)
    settings = {"root": str(tmp_path / "boxes"), "allow_unsafe_local": True}
    runtime = await asyncio.to_thread(create_runtime, name, settings)
    await runtime.probe()
    yield Place(name, settings, runtime)
    for info in await runtime.boxes():
        if box := await runtime.attach(info.box_id):
            await box.destroy()


@pytest.fixture
async def box(place: Place) -> Box:
    return await place.box()


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("polar.runtime"):
        yield


@pytest.fixture
def running() -> Callable[[str], list[int]]:
    """Ids of live processes of this machine whose command line holds a text."""

    def find(text: str) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    line = Path(f"/proc/{name}/cmdline").read_bytes()
                except OSError:
                    continue
                if text.encode() in line:
                    found.append(int(name))
        return found

    return find
