"""The gateway as a process: opens what a node needs in order, runs it, and gives it back in reverse.

- An attempt on the books is reported as ended exactly once, and no sooner than its last process is dead.
- A start first makes sure that nothing of the process before still runs, and only then says that it is lost.
- `drain` loses nothing: what waits goes on at the next start, what runs is ended and reported.
- INIT goes on while all RUN slots are busy.

One process (`stage` all) or two (`init`, `run`) over one state file.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from aiohttp import web
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings
from polar.runtime import Door
from polar.schemas import Capacity, Offers
from polar.schemas.catalog import HARNESSES
from polar.schemas.topics import Service
from polar.service.clock import Clock, SystemClock
from polar.service.logs import get_logger
from polar.service.node import NodeLink
from polar.service.randomness import Randomness, SystemRandomness, new_id
from polar.service.settings import CommonSettings

from .boxes import Boxes, open_runtimes
from .metrics import Metrics
from .node import Node
from .reporter import Reporter
from .runtime_api import RuntimeApi
from .settings import GatewaySettings
from .state import Books, FileLock, machine_boot
from .work import Workers

log = get_logger(__name__)


class GatewayService:
    """`run` until cancelled; `drain` before that where there is time.

    `registry`: where the numbers for Prometheus go; one of its own by default.
    """

    def __init__(
        self,
        settings: GatewaySettings | None = None,
        bus: BusSettings | None = None,
        common: CommonSettings | None = None,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._settings = settings or GatewaySettings()
        self._bus_settings = bus or BusSettings()
        self._common = common or CommonSettings()
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._registry = registry or CollectorRegistry()
        self._node: Node | None = None
        self._link: NodeLink | None = None
        self._reporter: Reporter | None = None
        self._runtime_api: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the node takes assignments."""
        return self._link is not None and not self._link.draining

    @property
    def runtime_api(self) -> str | None:
        """Where graders reach this node's boxes; None before the start, and in a process that only prepares."""
        return self._runtime_api

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            NodeInUse: another process has this half of the node.
            NoBackend: the default runtime does not work here.
            BusError: no broker, or wrong topics.
        """
        settings, clock = self._settings, self._clock
        folder = self._common.state_dir.absolute() / "gateway" / settings.node_id
        async with AsyncExitStack() as stack:
            lock = await asyncio.to_thread(FileLock, folder, settings.stage, settings.node_id)
            stack.callback(lock.close)
            secret = await asyncio.to_thread(self._common.secret)
            bus = await stack.enter_async_context(Bus(self._bus_settings, Service.GATEWAY, clock=clock))
            await bus.prepare()
            runtimes = await open_runtimes(settings, settings.box_root or folder / "boxes")
            books = await stack.enter_async_context(
                await Books.open(
                    folder / "state.sqlite",
                    new_id=lambda: new_id(clock, self._randomness),
                    machine=await asyncio.to_thread(machine_boot),
                )
            )
            boxes = Boxes(runtimes, Door(settings.door), settings.node_id)
            metrics = Metrics(self._registry)
            workers = Workers(settings, books, boxes, bus, clock, metrics, secret=secret, logs=folder / "logs")
            node = Node(settings, books, boxes, workers, bus, clock, metrics)
            await node.kill_leftovers()
            await node.recover()
            if settings.stage.runs:
                self._runtime_api = await self._serve_api(stack, RuntimeApi(settings, books, boxes, clock, secret))
            self._reporter = Reporter(books, bus, metrics, backoff_max_s=settings.report_backoff_max_s)
            link = await self._make_link(bus, books, node, boxes)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reporter.run(), name="gateway reports")
                tasks.create_task(node.teardown.run(), name="gateway teardown")
                if settings.stage.prepares:
                    tasks.create_task(node.init.run(), name="gateway init")
                    tasks.create_task(node.reap(), name="gateway reaper")
                if settings.stage.runs:
                    tasks.create_task(node.running.run(), name="gateway run")
                    tasks.create_task(node.follow_ready(), name="gateway ready")
                tasks.create_task(link.run(), name="gateway link")
                self._node, self._link = node, link
                log.info("gateway is up", node=settings.node_id, stage=settings.stage, runtime_api=self._runtime_api)

    async def drain(self) -> None:
        """Finish or give back what there is, within `drain_grace_s`, and tell the log. `run` is cancelled after."""
        if self._node is None or self._link is None or self._reporter is None:
            return
        log.info("draining", node=self._settings.node_id)
        self._link.draining = True
        self._link.beat_now()
        await self._node.drain()
        await self._reporter.flushed()

    async def _make_link(self, bus: Bus, books: Books, node: Node, boxes: Boxes) -> NodeLink:
        settings = self._settings
        half = settings.stage
        return NodeLink(
            bus,
            node_id=settings.node_id,
            boot_id=books.boot_id,
            half=half.value,
            capacity=Capacity(
                init=settings.init_slots if half.prepares else 0,
                ready=settings.ready_slots if half.prepares else 0,
                run=settings.run_slots if half.runs else 0,
            ),
            offers=Offers(backends=boxes.backends, harnesses=[*HARNESSES.names(), *settings.import_paths]),
            held=node.held,
            on_assignment=node.on_assignment if half.prepares else None,
            runtime_api=self._runtime_api,
            heartbeat_s=settings.heartbeat_s,
            start=await books.read_to() if half.prepares else None,
            on_read_to=books.set_read_to if half.prepares else None,
        )

    async def _serve_api(self, stack: AsyncExitStack, api: RuntimeApi) -> str:
        settings = self._settings
        # a client that goes away cancels its handler, and with it the command
        runner = web.AppRunner(api.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, settings.runtime_api_host, settings.runtime_api_port).start()
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        return settings.runtime_api_url or f"http://{shown}:{port}"
