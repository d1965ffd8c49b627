"""Going on at cursors: a reader at the places they name, or an error that names what the log has lost meanwhile.

A cursor below the log's start means that retention was shorter than the time away; one beyond the log's end, that the
topic was made anew or its log was cut off. Neither is ever a silent reset. Who has read what was lost may go on with
`accept_loss`: at the log's start in the first case, at the first record written after the cursor in the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog

from polar.schemas.results import Cursor

from .errors import RecordGone
from .reader import Reader

if TYPE_CHECKING:
    from .bus import Bus

Place = tuple[str, int]
"""Topic without prefix, partition."""

SETTLE_S = 5.0
"""For so long a cursor must be beyond the end: a partition's new leader may not know all of its committed end yet."""
LOOK_S = 0.5

_log = structlog.get_logger(__name__)


class CursorLost(RecordGone):
    """A cursor is not within its log; the message and the fields say what is lost."""

    def __init__(self, owner: str, place: Place, cursor: Cursor, log_start: int, log_end: int) -> None:
        topic, partition = place
        where = f"{owner} cannot go on with partition {partition} of `{topic}`"
        stands = f"its cursor stands at offset {cursor.next} (state from {cursor.replay_from})"
        if cursor.next > log_end:
            self.lost = (min(log_end, cursor.replay_from), cursor.next - 1)
            written = datetime.fromtimestamp(cursor.at_ms / 1000, UTC).isoformat(timespec="seconds")
            message = (
                f"{where}: {stands}, and the log ends at {log_end}: the topic was made anew or its log was cut off, "
                f"and offsets {self.lost[0]} to {self.lost[1]} are not what they were; `accept_loss` goes on at the "
                f"first record written after the cursor ({written})"
            )
        else:
            self.lost = (cursor.replay_from, log_start - 1)
            parts = []
            if cursor.next < log_start:
                parts.append(f"offsets {cursor.next} to {log_start - 1} were never processed and are lost")
            rebuilt = min(cursor.next, log_start)
            if cursor.replay_from < rebuilt:
                parts.append(f"offsets {cursor.replay_from} to {rebuilt - 1}, which rebuild its state, are lost")
            message = (
                f"{where}: {stands}, and the log starts at {log_start}: {'; '.join(parts)}. Retention was shorter than "
                "the time away: raise it; `accept_loss` goes on without them"
            )
        super().__init__(message, topic=topic, partition=partition, offset=self.lost[0], log_start=log_start)
        self.cursor = cursor
        self.log_end = log_end


async def open_at_cursors(
    bus: Bus,
    topics: Sequence[str],
    cursors: Mapping[Place, Cursor],
    *,
    owner: str,
    accept_loss: bool,
    partitions: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Reader, dict[Place, Cursor]]:
    """A committed reader at each cursor's `replay_from`, and at the log's start where there is no cursor.

    Args:
        owner: whose cursors they are, for the message.
        partitions: as for `Bus.reader`.

    Returns:
        The reader, and the cursors that took the place of lost ones, to be written before anything else is.

    Raises:
        CursorLost: and `accept_loss` is not set.
        BrokerUnavailable: no broker answers.
    """
    reader = await bus.reader(topics, partitions=partitions)
    try:
        starts = reader.positions()
        ends = await _settled_ends(bus, reader, cursors)
        moved: dict[Place, Cursor] = {}
        for place, cursor in cursors.items():
            if place not in starts:
                continue  # of a topic that is no longer read
            go_on = cursor
            if cursor.replay_from < starts[place] or cursor.next > ends[place]:
                lost = CursorLost(owner, place, cursor, starts[place], ends[place])
                if not accept_loss:
                    raise lost
                go_on = moved[place] = await _beyond_the_loss(bus, place, cursor, starts[place], ends[place])
                _log.error("going on without lost records, as the setting says", lost=str(lost), at=go_on.next)
            reader.seek(*place, go_on.replay_from)
    except BaseException:
        await reader.close()
        raise
    return reader, moved


async def _settled_ends(bus: Bus, reader: Reader, cursors: Mapping[Place, Cursor]) -> dict[Place, int]:
    """The ends of the log, asked again for a while where a cursor is beyond one."""
    deadline = bus.clock.monotonic() + SETTLE_S
    while True:
        ends = await reader.ends()
        within = all(cursor.next <= ends[place] for place, cursor in cursors.items() if place in ends)
        if within or bus.clock.monotonic() > deadline:
            return ends
        await bus.clock.sleep(LOOK_S)


async def _beyond_the_loss(bus: Bus, place: Place, cursor: Cursor, start: int, end: int) -> Cursor:
    topic, partition = place
    after = max(cursor.next, start)
    if cursor.next > end:
        finder = await bus.reader([topic], partitions={topic: [partition]}, start=cursor.at_ms or "latest")
        after = finder.positions()[place]
        await finder.close()
    return Cursor(next=after, replay_from=min(max(cursor.replay_from, start), after), at_ms=bus.clock.now_ms())
