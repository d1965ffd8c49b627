"""/health, /ready and /metrics of a process, on a port of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest


class Admin:
    """A service (see `polar.service.run`) that answers operators: alive, ready, metrics in Prometheus' format."""

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        ready: Callable[[], bool] = lambda: True,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """
        Args:
            port: 0 takes a free one; `port` says which once it runs.
            ready: whether the process does its work; asked at each request.
            registry: whose metrics.
        """
        self.port = port
        self._host = host
        self._ready = ready
        self._registry = registry
        self.started = asyncio.Event()

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._is_ready)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self.port)
            await site.start()
            self.port = runner.addresses[0][1]
            self.started.set()
            await asyncio.get_running_loop().create_future()
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _is_ready(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.json_response({"status": "ready" if ready else "starting"}, status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        # a few thousand series take some ms
        text = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
