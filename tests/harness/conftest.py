"""Boxes for real harnesses, each with a door to a proxy in front of the scripted engine."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import polar.devmodel
from polar.devmodel import ChatTokenizer
from polar.runtime import BoxSpec, create_runtime
from polar.runtime import Door as Way
from tests.harness.building import keeps_thinking
from tests.harness.place import Place, Relay
from tests.proxy.conftest import buses, door_to, engine_of  # noqa: F401 - fixtures
from tests.proxy.harness import Door

TOKENIZER = Path(polar.devmodel.__file__).parent / "data"


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """The bundled one, with another model's chat template where POLAR_TEST_CHAT_TEMPLATE names a file."""
    template = os.environ.get("POLAR_TEST_CHAT_TEMPLATE")
    return ChatTokenizer.from_files(TOKENIZER, template) if template else ChatTokenizer.small()


@pytest.fixture(scope="session")
def thoughtful() -> ChatTokenizer:
    """One whose template shows thinking."""
    return keeps_thinking()


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes boxes: `await places(door, session="s1", read_only=["/folders/it/sees"], path=["/in/front/of/PATH"])`.

    Skips, by the probe's own words, where no sandbox works.
    """
    async with AsyncExitStack() as stack:

        async def make(
            door: Door,
            *,
            session: str = "s1",
            read_only: Sequence[str] = (),
            path: Sequence[str] = (),
            python: bool = False,
            **spec: Any,
        ) -> Place:
            options = {
                "root": str(tmp_path / "boxes"),
                "read_only": list(read_only),
                "path": list(path),
                "python": python,
            }
            runtime = await asyncio.to_thread(create_runtime, "local", options)  # it imports and looks at the disk
            probe = await runtime.probe()
            if not probe.ok:
                pytest.skip(f"no sandbox: {probe.reason} ({probe.hint})")
            relay = await stack.enter_async_context(Relay(("127.0.0.1", door.service.port)))
            box = await runtime.create(BoxSpec(box_id=str(uuid.uuid4()), **spec), Way(("127.0.0.1", relay.port)))
            stack.push_async_callback(box.destroy)
            return Place(box, door, relay, session)

        yield make
