"""A finisher process for tests: `python run_finisher.py`; settings come from the environment."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from polar.bus import Bus, BusSettings
from polar.evaluator import EvaluatorSettings, FinisherService
from polar.schemas.topics import Service
from polar.service.run import run_services


@asynccontextmanager
async def opened() -> AsyncIterator[list[FinisherService]]:
    async with Bus(BusSettings(), Service.FINISHER) as bus:
        yield [FinisherService(bus, EvaluatorSettings())]


if __name__ == "__main__":
    sys.exit(run_services(opened))
