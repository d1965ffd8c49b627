"""A proxy process for tests: `python run_proxy.py SECRET`; settings come from the environment. Prints its port."""

from __future__ import annotations

import asyncio
import sys

from polar.bus import Bus, BusSettings
from polar.proxy import ProxyService, ProxySettings
from polar.schemas.topics import Service


async def main() -> None:
    async with Bus(BusSettings(), Service.PROXY) as bus:
        service = ProxyService(ProxySettings(), bus, sys.argv[1])
        running = asyncio.create_task(service.run())
        ready = asyncio.create_task(service.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            print(service.port, flush=True)
        await running


if __name__ == "__main__":
    asyncio.run(main())
