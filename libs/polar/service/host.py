"""What a process gives the services it hosts: settings, clock, secret, and a connection to the log for each role.

A service package has a module `main` with `SETTINGS`, the kinds of settings it reads, and `services(host)`, which makes
its services for this process; so whoever starts a process needs to know nothing else of them.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from polar.schemas.topics import Service

from .clock import Clock, SystemClock
from .randomness import Randomness, SystemRandomness
from .settings import CommonSettings

if TYPE_CHECKING:
    from polar.bus import Bus, BusSettings


class Host:
    """One process; what it opened is closed with `stack`."""

    def __init__(
        self,
        common: CommonSettings,
        kafka: BusSettings,
        stack: AsyncExitStack,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry`: where the metrics of all its services go; one of its own where absent."""
        self.common = common
        self.kafka = kafka
        self.registry = registry or CollectorRegistry()
        self.clock = clock or SystemClock()
        self.randomness = randomness or SystemRandomness()
        self._stack = stack

    async def bus(self, service: Service) -> Bus:
        """A connection that may write what the topic table lets `service` write; topics are there and checked.

        Raises:
            BrokerUnavailable, TopicsWrong: see `polar.bus`.
        """
        from polar.bus import Bus

        bus = await self._stack.enter_async_context(Bus(self.kafka, service, clock=self.clock))
        await bus.prepare()
        return bus

    async def secret(self) -> str:
        """What signs session tokens and box keys; the same in every process."""
        return await asyncio.to_thread(self.common.secret)
