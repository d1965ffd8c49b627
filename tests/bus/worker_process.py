"""A worker to be killed: counts the calls of sessions (see `Counter`), slowly enough to be in the middle of something.

usage: python -m tests.bus.worker_process SETTINGS_JSON SEED
"""

from __future__ import annotations

import asyncio
import random
import sys

from polar.bus import Bus, BusSettings, PartitionWorker, Record, Send
from polar.schemas.topics import Service
from polar.service.logs import configure_logs
from polar.service.run import run_services
from tests.bus.support import Counter


class Dawdler(Counter):
    """Waits a little, before and inside the transaction."""

    def __init__(self, randomness: random.Random) -> None:
        super().__init__()
        self._random = randomness

    async def process(self, record: Record, send: Send) -> None:
        await asyncio.sleep(self._random.random() * 0.01)
        await super().process(record, send)
        await asyncio.sleep(self._random.random() * 0.01)


class Working:
    def __init__(self, settings: BusSettings, seed: int) -> None:
        self._settings = settings
        self._random = random.Random(seed)

    async def run(self) -> None:
        async with Bus(self._settings, Service.BUILDER) as bus:
            make = PartitionWorker(bus, "completions", "builder", lambda _: Dawdler(self._random), max_batch=10)
            await make.run()


if __name__ == "__main__":
    configure_logs("info", "json")
    settings = BusSettings.model_validate_json(sys.argv[1])
    sys.exit(run_services([Working(settings, int(sys.argv[2]))], grace_s=1))
