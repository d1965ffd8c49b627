"""A worker to be killed: counts the calls of sessions (see `Counter`), slowly enough to be in the middle of something.

With `hang` as third argument its processor never gets anything done, as one that waits for what does not come.

usage: python -m tests.bus.worker_process SETTINGS_JSON SEED [hang]
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


class Hanger(Counter):
    async def process(self, record: Record, send: Send) -> None:
        await asyncio.Event().wait()


class Working:
    def __init__(self, settings: BusSettings, seed: int, *, hang: bool) -> None:
        self._settings = settings
        self._random = random.Random(seed)
        self._hang = hang

    def _make(self, _: int) -> Counter:
        return Hanger() if self._hang else Dawdler(self._random)

    async def run(self) -> None:
        async with Bus(self._settings, Service.BUILDER) as bus:
            await PartitionWorker(bus, "completions", "builder", self._make, max_batch=10).run()


if __name__ == "__main__":
    configure_logs("info", "json")
    settings = BusSettings.model_validate_json(sys.argv[1])
    service = Working(settings, int(sys.argv[2]), hang=sys.argv[3:] == ["hang"])
    sys.exit(run_services([service], grace_s=1))
