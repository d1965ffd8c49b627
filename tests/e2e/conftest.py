"""Fixtures of the whole pipeline: a broker, a scripted engine, and Polar's processes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polar.devmodel import Script, ScriptedEngine
from tests.e2e.stack import Stack


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(Script()) as one:
        yield one


@pytest.fixture
def make_stack(tmp_path: Path, bootstrap: str) -> Iterator[object]:
    made: list[Stack] = []

    def make(engine_url: str, **options: object) -> Stack:
        stack = Stack(
            tmp_path / f"stack{len(made)}",
            bootstrap,
            engine_url,
            prefix=f"test-{uuid.uuid4().hex[:8]}.",
            **options,  # type: ignore[arg-type]
        )
        made.append(stack)
        return stack

    yield make
    for stack in made:
        stack.stop()
