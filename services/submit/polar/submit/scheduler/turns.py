"""Whose turn it is to lead: what a scheduler learns from the ticks before it starts the producer that fences others.

A leader's ticks stand in `polar.nodes`. Who starts, or has lost the log for a while, leads at once only where nobody
else can be leading: there is no tick (nobody ever led, or the last leader resigned by deleting it), the newest one is
this process's own, or it is so old that no clock can be that wrong. Everyone else stands by until the ticks have been
silent for `leader_silence`, as seen by successful reads alone: an outage of the log is nobody's silence. So a joining
standby changes nothing, and a leader that wakes from a pause finds its successor's ticks before it can fence it.
"""

from __future__ import annotations

import structlog

from polar.bus import Bus, BusError, Reader
from polar.schemas import Tick

from .settings import SchedulerSettings

TICK_KEY = "tick"
LOOKS = 4
"""Reads of the ticks in one `leader_silence`."""
STALE_SILENCES, STALE_LEAST_S = 15, 60.0
"""A tick older than so many silences, and at least so many seconds, by the clocks of two machines: nobody leads."""

log = structlog.get_logger("polar.submit.scheduler")


class Turns:
    """Waits for this process's turn. `leader_id` is the process's, without the number of a term."""

    def __init__(self, bus: Bus, settings: SchedulerSettings, leader_id: str) -> None:
        self._bus = bus
        self._settings = settings
        self._leader_id = leader_id

    async def wait(self, *, fenced: bool) -> str:
        """Returns, with the reason, when this process may start the leader's producer.

        `fenced`: another one has just taken over; only silence ends its turn. A log that is away is waited for.

        Raises:
            BusError: not retryable, such as a missing permission.
        """
        while True:
            try:
                return await self._wait(fenced=fenced)
            except BusError as error:
                if not error.retryable:
                    raise
                log.warning("the ticks cannot be read; trying again", error=str(error))
                await self._bus.clock.sleep(self._settings.tick_seconds)

    async def _wait(self, *, fenced: bool) -> str:
        reader = await self._bus.reader(["nodes"])
        try:
            last = await self._newest(reader)
            reason = None if fenced else self._free(last)
            if reason is not None:
                return reason
            log.info("standing by", leader=None if last is None else last.leader_id)
            return await self._silence(reader)
        finally:
            await reader.close()

    async def _newest(self, reader: Reader) -> Tick | None:
        last: Tick | None = None
        async for record in reader.to_end():
            if record.key == TICK_KEY:
                last = record.value if isinstance(record.value, Tick) else None
        return last

    def _free(self, last: Tick | None) -> str | None:
        """Why nobody else can be leading; None: somebody may be."""
        if last is None:
            return "no scheduler has led before, or the last one resigned"
        if last.leader_id.rpartition("/")[0] == self._leader_id:
            return "nobody has led since this process did"
        age_s = (self._bus.clock.now_ms() - last.at_ms) / 1000
        if age_s > max(STALE_SILENCES * self._settings.leader_silence, STALE_LEAST_S):
            return f"the last tick is {age_s:.0f} s old"
        return None

    async def _silence(self, reader: Reader) -> str:
        """Two successful reads to the end of `polar.nodes`, `leader_silence` apart, and no tick up to the second."""
        clock, limit = self._bus.clock, self._settings.leader_silence
        first: float | None = None
        """When the ticks had been read to their end for the first time since the last one came."""
        while True:
            await clock.sleep(limit / LOOKS)
            try:
                heard, resigned = await self._look(reader)
            except BusError as error:
                if not error.retryable:
                    raise
                log.info("no word from the log while standing by", error=str(error))
                first = None
                continue
            if resigned:
                return "the leader resigned"
            now = clock.monotonic()
            if heard or first is None:
                first = now
            elif now - first >= limit:
                return f"no tick for {now - first:.1f} s"

    async def _look(self, reader: Reader) -> tuple[bool, bool]:
        """Whether a tick has come since the last look, and whether the newest word is a resignation."""
        heard = resigned = False
        ends = await reader.ends()
        while not reader.reached(ends):
            before = reader.positions()
            for record in await reader.poll():
                if record.key == TICK_KEY:
                    heard, resigned = True, record.value is None
            if reader.positions() == before:
                # the log may be going away again: ask it, which raises then
                ends = {place: min(end, ends[place]) for place, end in (await reader.ends()).items()}
        return heard, resigned
