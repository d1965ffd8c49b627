"""A node's link to the scheduler: its assignments in, its heartbeats out. Used by gateways and evaluators.

Assignments are read without a group from the one partition that the node id hashes to, handed on in order, each only
when the one before is on the node's books; then `read_to` moves past it. A heartbeat takes `read_to` first and `held`
second: what lies below `read_to` and is not held counts as lost, so the list must never be older than the mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from polar.bus import Bus, BusError, Out, Reader, RecordGone
from polar.schemas.base import Event
from polar.schemas.nodes import Capacity, Held, NodeHeartbeat, Offers

TOPIC = "assignments"

_log = structlog.get_logger(__name__)


class NodeLink:
    """A service (see `polar.service.run`): runs beside whatever does the node's work."""

    def __init__(
        self,
        bus: Bus,
        *,
        node_id: str,
        boot_id: str,
        capacity: Capacity,
        held: Callable[[], Awaitable[Sequence[Held]]],
        on_assignment: Callable[[Event, int], Awaitable[None]] | None = None,
        half: str = "all",
        offers: Offers | None = None,
        runtime_api: str | None = None,
        heartbeat_s: float = 1.0,
        start: int | None = None,
        on_read_to: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            half: `all`, `init` or `run`. `run` beats only; the others read assignments too.
            held: everything on the node's books, of both halves.
            on_assignment: gets each value of `assignments` with this node's key, and its offset. It must have put the
                assignment on the books when it returns, for that is what `read_to` tells the scheduler; it must not
                wait for the work. It sees an assignment again after a restart, and those of former boots.
            start: the next offset to read, as `on_read_to` last had it. None: from the end as it is when `run` begins,
                which is right for a new boot id, since nothing is assigned to one before its first heartbeat.
            on_read_to: gets each new `read_to`, to be kept as the next `start`.
        """
        if half not in ("all", "init", "run"):
            raise ValueError(f"half is `all`, `init` or `run`, not {half!r}")
        if half != "run" and on_assignment is None:
            raise ValueError("a node that reads assignments needs on_assignment")
        self._bus = bus
        self._node_id = node_id
        self._boot_id = boot_id
        self._half = half
        self._held = held
        self._on_assignment = on_assignment
        self._runtime_api = runtime_api
        self._heartbeat_s = heartbeat_s
        self._start = start
        self._on_read_to = on_read_to
        self._beat = 0
        self._beat_now = asyncio.Event()
        self.capacity = capacity
        """May change while it runs."""
        self.offers = offers or Offers()
        self.draining = False
        """Set it to be given nothing new."""
        self.read_to = -1
        self.partition = bus.partition_of(TOPIC, node_id)
        self.beating = asyncio.Event()
        """Set once the first heartbeat is acknowledged."""

    async def run(self) -> None:
        """Reads and beats until cancelled.

        Raises:
            Exception: what `on_assignment`, `held` or `on_read_to` raises.
            BusError: not retryable.
        """
        reader = None if self._half == "run" else await self._open()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat_on())
                if reader is not None:
                    tasks.create_task(self._read_on(reader))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if reader is not None:
                await reader.close()

    def beat_now(self) -> None:
        """Sends the next heartbeat at once, e.g. when capacity or draining has changed."""
        self._beat_now.set()

    async def _open(self) -> Reader:
        only = {TOPIC: [self.partition]}
        try:
            if self._start is None:
                reader = await self._bus.reader([TOPIC], partitions=only, start="latest")
            else:
                reader = await self._bus.reader([TOPIC], partitions=only, start={(TOPIC, self.partition): self._start})
        except RecordGone as gone:
            # what was assigned there is not on the books and so will be assigned anew
            _log.warning("assignments were deleted before they were read", node=self._node_id, lost=str(gone))
            reader = await self._bus.reader([TOPIC], partitions=only)
        self.read_to = reader.positions()[TOPIC, self.partition]
        return reader

    async def _read_on(self, reader: Reader) -> None:
        assert self._on_assignment is not None
        while True:
            try:
                records = await reader.poll()
            except RecordGone as gone:
                _log.warning("assignments were deleted before they were read", node=self._node_id, lost=str(gone))
                if gone.log_start is None:
                    raise
                reader.seek(TOPIC, self.partition, gone.log_start)
                continue
            for record in records:
                if record.key == self._node_id:
                    if record.value is not None:
                        await self._on_assignment(record.value, record.offset)
                    else:
                        # not on the books, and so assigned anew; the letter tells an operator why
                        await self._bus.dead_letter(record, str(record.error or "it has no value"))
                    await self._read_up_to(record.offset + 1)
            await self._read_up_to(reader.positions()[TOPIC, self.partition])

    async def _read_up_to(self, offset: int) -> None:
        if offset > self.read_to:
            self.read_to = offset
            if self._on_read_to is not None:
                await self._on_read_to(offset)

    async def _beat_on(self) -> None:
        key = self._node_id if self._half == "all" else f"{self._node_id}/{self._half}"
        while True:
            read_to = self.read_to  # before the books, see the module
            held = list(await self._held())
            self._beat += 1
            beat = NodeHeartbeat(
                node_id=self._node_id,
                boot_id=self._boot_id,
                half=self._half,
                capacity=self.capacity,
                held=held,
                read_to=read_to,
                offers=self.offers,
                runtime_api=self._runtime_api,
                draining=self.draining,
                beat=self._beat,
                at_ms=self._bus.clock.now_ms(),
            )
            try:
                await self._bus.send(Out("nodes", key, beat))
                self.beating.set()
            except BusError as error:
                if not error.retryable:
                    raise
                _log.warning("heartbeat not sent", node=self._node_id, reason=str(error))
            await self._wait()

    async def _wait(self) -> None:
        waiting = [
            asyncio.ensure_future(self._bus.clock.sleep(self._heartbeat_s)),
            asyncio.ensure_future(self._beat_now.wait()),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        self._beat_now.clear()
