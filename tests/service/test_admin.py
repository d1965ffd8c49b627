"""What an operator's tools ask a process."""

from __future__ import annotations

import asyncio

import aiohttp
from prometheus_client import CollectorRegistry, Counter

from polar.service.admin import Admin


async def test_health_readiness_and_metrics_are_answered() -> None:
    registry = CollectorRegistry()
    Counter("polar_things", "Things.", registry=registry).inc(3)
    ready = False
    admin = Admin(0, ready=lambda: ready, registry=registry)
    task = asyncio.create_task(admin.run())
    await asyncio.wait_for(admin.started.wait(), 5)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{admin.port}") as http:
        async with http.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "alive"})
        async with http.get("/ready") as answer:
            assert (answer.status, await answer.json()) == (503, {"status": "starting"})
        ready = True
        async with http.get("/ready") as answer:
            assert answer.status == 200
        async with http.get("/metrics") as answer:
            assert "polar_things_total 3.0" in await answer.text()
            assert answer.content_type == "text/plain"
    task.cancel()
    await asyncio.wait([task])
