"""Follows `polar.policy`: a trainer's word that an engine has new weights.

What a record says of a call's weights is the engine's own word, never this one. It only serves where the engine has
none: its prefix cache is then separated by the published version. It ends with whoever runs it; while the broker is
away it waits.
"""

from __future__ import annotations

from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from polar.bus import Bus, BusError, Reader
from polar.schemas import PolicyPublished
from polar.service.clock import Clock
from polar.service.logs import get_logger

from ..errors import EngineError
from .engines import Engines
from .upstream import Upstream

POLICY = "policy"
log = get_logger(__name__)


class PolicyFollower:
    """See above."""

    def __init__(self, bus: Bus, engines: Engines, clock: Clock) -> None:
        self._bus = bus
        self._engines = engines
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            BusError: the topic cannot be read, and trying again does not help.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BusError) and error.retryable),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            sleep=self._clock.sleep,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                await self._follow()

    async def _follow(self) -> None:
        reader: Reader = await self._bus.reader([POLICY])
        try:
            while True:
                for record in await reader.poll():
                    if isinstance(record.value, PolicyPublished):
                        await self.take(record.value)
        finally:
            await reader.close()

    async def take(self, event: PolicyPublished) -> None:
        """One word of a trainer's."""
        for upstream in self._engines.all:
            version = published(event, upstream)
            if version is None:
                continue
            try:
                word = await upstream.endpoint.weight_version()
            except EngineError:
                word = None
            if word is None:
                upstream.endpoint.version = version
            elif word != version:
                log.warning("engine has other weights than published", engine=upstream.url, says=word, told=version)


def published(event: PolicyPublished, upstream: Upstream) -> str | None:
    """The version that `event` says `upstream` has; None: it speaks of others."""
    if event.endpoints:
        named = {url.rstrip("/"): version for url, version in event.endpoints.items()}
        return named.get(upstream.url) or named.get(upstream.endpoint.root)
    engine = upstream.endpoint.engine
    known = {upstream.spec.model, upstream.spec.served, None if engine is None else engine.model}
    return event.version if event.model in known else None
