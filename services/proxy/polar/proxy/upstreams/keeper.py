"""Looks after the engines: meets each at the start, then sees whether it is well, paused, and again what it is.

One loop per engine, so that a slow one holds no other up; `run` owns them and ends with them. The proxy is ready
without it: a call that comes before asks for itself.
"""

from __future__ import annotations

import asyncio

from polar.service.clock import Clock
from polar.service.logs import get_logger

from ..errors import EngineError, EngineUnfit, ModelUnknown
from ..settings import ProxySettings
from .engines import Engines
from .upstream import Upstream

RETEST_EVERY_S = 15.0
"""Of an engine that failed its self-test, which costs it a token or two."""
log = get_logger(__name__)


class Keeper:
    """See above."""

    def __init__(self, engines: Engines, settings: ProxySettings, clock: Clock) -> None:
        self._engines = engines
        self._settings = settings
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for upstream in self._engines.all:
                group.create_task(self._keep(upstream))

    async def _keep(self, upstream: Upstream) -> None:
        settings = self._settings
        tested = -RETEST_EVERY_S
        while True:
            try:
                await self._look(upstream)
                now = self._clock.monotonic()
                due = upstream.endpoint.unfit is None or now - tested >= RETEST_EVERY_S
                if upstream.endpoint.engine is None and upstream.health.out is None and not upstream.is_paused and due:
                    tested = now
                    await self._meet(upstream)
                upstream.note_fitness()
            except Exception as error:  # noqa: BLE001 - one wrong look must not be the last one
                log.error("looking at an engine failed", engine=upstream.url, error=type(error).__name__)
            calm = upstream.usable and upstream.engine_paused_since is None
            await self._clock.sleep(settings.engine_probe_every if calm else settings.engine_cooldown)

    async def _look(self, upstream: Upstream) -> None:
        endpoint = upstream.endpoint
        try:
            well = await endpoint.well()
            paused = well and await endpoint.paused()
        except EngineError:
            # away or silent; a refused connection has told its story already
            upstream.said(well=False)
            return
        upstream.said(well)
        now = self._clock.monotonic()
        if well:
            upstream.seen_paused(paused, now)
        upstream.give_up_on(self._settings.engine_silence, now)

    async def _meet(self, upstream: Upstream) -> None:
        try:
            engine = await upstream.endpoint.identity()
        except (EngineUnfit, ModelUnknown):
            return  # `note_fitness` tells
        except EngineError as error:
            log.warning("engine not met yet", engine=upstream.url, reason=error.message)
        else:
            log.info(
                "engine",
                engine=upstream.url,
                kind=upstream.endpoint.shape.name,
                model=engine.model,
                build=engine.build,
                logprobs_mode=str(engine.logprobs_mode),
            )
