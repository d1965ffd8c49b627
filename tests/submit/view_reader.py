"""A process with nothing but a view, for tests that kill it: `python -m tests.submit.view_reader FILE BATCH`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings
from polar.schemas.topics import Service
from polar.submit.entries import ViewLimits
from polar.submit.feed import ViewFeed, identity_of
from polar.submit.metrics import SubmitMetrics
from polar.submit.view import View

LIMITS = ViewLimits(max_tasks=60)


async def main(path: Path, batch: int) -> None:
    settings = BusSettings()
    async with (
        Bus(settings, Service.SUBMIT) as bus,
        await View.open(path, LIMITS, identity=identity_of(settings)) as view,
    ):
        await ViewFeed(bus, view, SubmitMetrics(CollectorRegistry()), [], batch_records=batch).run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
