"""A builder process for tests: `python run_builder.py STATE_DIR`; settings come from the environment."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polar.builder.service import BuilderService
from polar.builder.settings import BuilderSettings
from polar.bus import Bus, BusSettings
from polar.schemas.topics import Service
from polar.service.run import run_services


@asynccontextmanager
async def opened() -> AsyncIterator[list[BuilderService]]:
    async with Bus(BusSettings(), Service.BUILDER) as bus:
        yield [BuilderService(bus, BuilderSettings(), state_dir=Path(sys.argv[1]))]


if __name__ == "__main__":
    sys.exit(run_services(opened))
