"""What the demo reads once its tasks have ended: words from the engine, records from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from polar.bus import BusSettings
from polar.bus.clients import Clients, stop_admin
from polar.client import PolarClient
from polar.schemas import Trajectory

from ..words import EngineTokenizer, NoWords
from .insight import Built, Example, choose, compared, example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from polar.builder import Entry


@dataclass(frozen=True)
class Closer:
    """A closer look at one session. `why_no_words`: why there is no example, where the engine would not tell."""

    example: Example | None = None
    built: list[Built] = field(default_factory=list)
    why_no_words: str | None = None


async def look_closer(
    client: PolarClient, engine: str, model: str | None, trajectories: Sequence[Trajectory]
) -> Closer:
    """The session that shows best what re-tokenizing does, and how each strategy builds it."""
    why = None
    found: Example | None = None
    try:
        found = await asyncio.to_thread(_example, engine, model, trajectories)
    except NoWords as error:
        why = str(error)
    shown = found.trajectory if found is not None else next((one for one in trajectories if one.traces), None)
    if shown is None:
        return Closer(why_no_words=why)
    entries = await entries_of(client, shown)
    return Closer(found, await asyncio.to_thread(compared, entries), why)


def _example(engine: str, model: str | None, trajectories: Sequence[Trajectory]) -> Example | None:
    with EngineTokenizer(engine, model) as words:
        tokenizer = cast("Tokenizer", words)  # it has what is asked of one
        chosen = choose(trajectories, tokenizer)
        return example(chosen, tokenizer) if chosen is not None else None


async def entries_of(client: PolarClient, trajectory: Trajectory) -> list[Entry]:
    """A session's records on the log, in its order, from its opening on."""
    from polar.builder import Entry

    partition, start = trajectory.opening.partition, trajectory.opening.offset
    reader = await client.bus.reader(
        ["completions"], start={("completions", partition): start}, partitions={"completions": [partition]}
    )
    try:
        return [
            Entry(record.ref, record.value)
            async for record in reader.to_end()
            if record.key == trajectory.session_id and record.value is not None
        ]
    finally:
        await reader.close()


async def drop_topics(settings: BusSettings) -> int:
    """Delete the topics of these settings' prefix; returns how many there were."""
    admin = await Clients(settings, "demo").admin()
    try:
        names = [name for name in await admin.list_topics() if name.startswith(settings.topic_prefix)]
        if names:
            await admin.delete_topics(names)
        return len(names)
    finally:
        await stop_admin(admin)
