"""Nodes and the scheduler in the view: alive by the scheduler's ticks, bounded, and kept over a restart."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from polar.schemas import Event
from polar.submit.documents import nodes_document, status_document
from polar.submit.entries import ViewLimits
from polar.submit.view import View
from tests.submit.records import NAMES, beat, message, ref, tick

Open = Callable[[ViewLimits], Awaitable[View]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def make(limits: ViewLimits) -> View:
            return await stack.enter_async_context(await View.open(tmp_path / "view.sqlite", limits))

        yield make


async def put(view: View, event: Event | None, key: str) -> None:
    place = ref(view.next_offset("nodes", 0), topic="nodes")
    await view.apply([message(event, place, key)], NAMES)


async def test_nodes_live_by_the_schedulers_ticks(opened: Open) -> None:
    view = await opened(ViewLimits(dead_after_ticks=3))
    await put(view, beat("n1"), "n1")
    await put(view, beat("n2", half="run"), "n2/run")
    for number in range(2):
        await put(view, tick(number), "tick")
    await put(view, beat("n2", 2, half="run"), "n2/run")
    await put(view, tick(3), "tick")
    document = nodes_document(view)
    assert {one["key"]: one["alive"] for one in document["nodes"]} == {"n1": False, "n2/run": True}
    assert document["nodes"][0]["capacity"] == {"init": 1, "ready": 1, "run": 2, "grade": 0}
    assert document["scheduler"] == {"leader_id": "l", "tick": 3, "last_tick_ms": 3_000}
    await view.close()
    again = await opened(ViewLimits(dead_after_ticks=3))
    assert nodes_document(again) == document, "as before the restart"
    assert status_document(again, {})["nodes"] == document


async def test_without_a_scheduler_no_node_dies(opened: Open) -> None:
    view = await opened(ViewLimits(dead_after_ticks=1))
    await put(view, beat("n1"), "n1")
    assert nodes_document(view)["nodes"][0]["alive"]
    assert nodes_document(view)["scheduler"] is None


async def test_a_tombstone_takes_a_node_away(opened: Open) -> None:
    view = await opened(ViewLimits())
    await put(view, beat("n1"), "n1")
    await put(view, None, "n1")
    assert view.nodes == {}
    await view.apply([message(None, ref(0)), message(None, ref(0, topic="results"))], NAMES)
    await view.close()
    assert (await opened(ViewLimits())).nodes == {}


async def test_nodes_are_bounded_the_longest_silent_goes(opened: Open) -> None:
    view = await opened(ViewLimits(max_nodes=2))
    for name in ("a", "b", "a", "c"):
        await put(view, beat(name), name)
    assert set(view.nodes) == {"a", "c"}
    await view.close()
    assert list((await opened(ViewLimits(max_nodes=2))).nodes) == ["a", "c"]
