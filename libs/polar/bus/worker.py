"""Consume, transform, produce: exactly once, and state that is rebuilt from the log.

A group only says which worker has which input partition; it holds no truth. For each partition a worker has, a
`PartitionTask` (see `partition.py`) starts the partition's transactional producer, reads its cursor, rebuilds the
state and goes on. Two workers that both believe to have a partition settle it by fencing: only the last one to start
the producer can commit. Group offsets are committed besides, for displays of lag alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError

from polar.schemas.results import Cursor
from polar.schemas.topics import topic as topic_row

from .bus import Bus
from .clients import stop_consumer
from .errors import BusError, Stuck, translated
from .partition import PartitionTask, Processor, Progress, Send
from .watchdog import Watchdog

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

POLL_S = 0.5
"""How often the group's consumer is looked after."""
OFFSETS_EVERY_S = 5.0
REJOIN_FIRST_S, REJOIN_MOST_S = 0.2, 5.0
LOOKS = 8
"""Looks of the watchdog in its limit."""
CANCEL_S = 30.0
"""How long what stands still may take to let itself be cancelled."""

_log = structlog.get_logger(__name__)


class _Metrics:
    """Where somebody counts: those who only read the log need no prometheus-client."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter

        self.restarts = Counter(
            f"polar_{service}_partition_restarts",
            "Partitions started anew because they stood still while records waited.",
            ["partition"],
            registry=registry,
        )
        self.rejoins = Counter(
            f"polar_{service}_rejoins", "Memberships of the group that had to be made anew.", registry=registry
        )


class PartitionWorker:
    """A service that processes a topic with one `Processor` per input partition; run as many as you like."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        service: str,
        make: Callable[[int], Processor],
        *,
        max_batch: int = 500,
        cursor_every_s: float = 1.0,
        accept_loss: bool = False,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """
        Args:
            topic: without prefix; one with as many partitions as `cursors`.
            service: names the group, the cursors and the transactional ids; never change it.
            make: a fresh processor for a partition; called again whenever the partition is (re)opened.
            max_batch: records per transaction at most.
            cursor_every_s: how long a cursor may lag behind records that led to no output.
            accept_loss: go on at the log's start where it has passed the cursor, instead of raising `RecordGone`. For
                an operator who has read what was lost.
            registry: where `polar_<service>_partition_restarts` and `polar_<service>_rejoins` are counted;
                None: nowhere.
        """
        if bus.partitions(topic) != bus.partitions("cursors") or topic_row(topic).partitions != "partitions":
            raise ValueError(f"`{topic}` has not the same partitions as `cursors`: a cursor of it has no place")
        self._bus = bus
        self._topic = topic
        self._service = service
        self._make = make
        self._max_batch = max_batch
        self._cursor_every_s = cursor_every_s
        self._accept_loss = accept_loss
        self._name = bus.settings.full(topic)
        self._tasks: dict[int, tuple[PartitionTask, asyncio.Task[None]]] = {}
        self._failed: asyncio.Future[None] | None = None
        settings = bus.settings
        self._watchdog = Watchdog(settings.watchdog_s, settings.watchdog_restarts)
        self._metrics = None if registry is None else _Metrics(service, registry)
        self.joined = False
        """Whether it is a member of the group; it may have no partition."""

    def progress(self) -> dict[int, Progress]:
        """Where it is, by partition it has."""
        return {number: task.progress for number, (task, _) in sorted(self._tasks.items())}

    async def run(self) -> None:
        """Works until cancelled; then stops its producers and leaves the group.

        Raises:
            CursorLost: a cursor is not within its log; the message names what is lost.
            Stuck: a partition stood still and was started anew `watchdog_restarts` times in a row, in vain.
            BusError: not retryable, such as a missing permission.
        """
        wait_s = REJOIN_FIRST_S
        while True:
            try:
                await self._belong()
            except BusError as error:
                if not error.retryable:
                    raise
                wait_s = REJOIN_FIRST_S if self.joined else min(wait_s * 2, REJOIN_MOST_S)
                if self._metrics is not None:
                    self._metrics.rejoins.inc()
                _log.warning("worker joins its group again", service=self._service, reason=str(error), in_s=wait_s)
            finally:
                self.joined = False
                await self._drop_all()
            await self._bus.clock.sleep(wait_s)

    async def _belong(self) -> None:
        """One membership, until it fails."""
        self._failed = asyncio.get_running_loop().create_future()
        listener = _Listener(self._gain, self._drop_all)
        group = self._bus.settings.full(self._service)
        consumer = await self._bus.clients.member(group, self._name, listener)
        clock = self._bus.clock
        reported = clock.monotonic()
        watching: asyncio.Task[None] | None = None
        try:
            self.joined = True
            watching = asyncio.create_task(self._watch(consumer), name=f"{self._service}/watchdog")
            watching.add_done_callback(self._ended)
            while True:
                self._pause(consumer)
                with translated(f"being a member of {group}"):
                    # nothing comes, all is paused: this only keeps the membership and raises its errors
                    await consumer.getmany(timeout_ms=10)
                done, _ = await asyncio.wait([self._failed], timeout=POLL_S)
                if done:
                    self._failed.result()
                if clock.monotonic() - reported > OFFSETS_EVERY_S:
                    reported = clock.monotonic()
                    await self._report(consumer)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])
            if self._failed.done() and not self._failed.cancelled():
                self._failed.exception()  # seen: the membership may be ending for another reason
            await self._drop_all()  # producers first: whoever gets the partitions next should not have to fence them
            await stop_consumer(consumer)

    def _pause(self, consumer: AIOKafkaConsumer) -> None:
        unpaused = consumer.assignment() - consumer.paused()
        if unpaused:
            consumer.pause(*unpaused)

    def _gain(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in self._tasks:
                continue
            one = PartitionTask(
                self._bus,
                self._topic,
                number,
                self._service,
                self._make,
                max_batch=self._max_batch,
                cursor_every_s=self._cursor_every_s,
                accept_loss=self._accept_loss,
            )
            self._start(number, one)

    def _start(self, number: int, one: PartitionTask) -> None:
        task = asyncio.create_task(one.run(), name=f"{self._service}/{self._topic}/{number}")
        task.add_done_callback(self._ended)
        self._tasks[number] = (one, task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._failed is None or self._failed.done():
            return
        error = task.exception()
        if error is not None:
            self._failed.set_exception(error)

    async def _drop_all(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CANCEL_S)
        if late and self._failed is not None and not self._failed.done():
            names = ", ".join(sorted(task.get_name() for task in late))
            self._failed.set_exception(Stuck(f"{names} cannot be stopped; the process ends for its supervisor"))

    async def _watch(self, consumer: AIOKafkaConsumer) -> None:
        """Looks after the partitions it has, and for those that nobody seems to have."""
        clock, limit_s = self._bus.clock, self._bus.settings.watchdog_s
        orphans: dict[int, int] = {}
        compared = clock.monotonic()
        while True:
            await clock.sleep(limit_s / LOOKS)
            ends = await self._ends(consumer)
            now = clock.monotonic()
            self._watchdog.keep(set(self._tasks))
            if ends is None:
                self._watchdog.unknown(now)
                orphans, compared = {}, now
                continue
            for number, (one, _) in list(self._tasks.items()):
                if self._watchdog.stands_still(number, one.progress, ends[number], now):
                    await self._start_anew(consumer, number)
            if now - compared >= 2 * limit_s:
                orphans, compared = await self._compare(orphans, ends), now

    async def _ends(self, consumer: AIOKafkaConsumer) -> dict[int, int] | None:
        """The committed end of each partition; None: the log cannot be asked."""
        wanted = [TopicPartition(self._name, number) for number in range(self._bus.partitions(self._topic))]
        try:
            with translated("asking for the ends of the input"):
                async with asyncio.timeout(self._bus.settings.request_timeout_s):
                    return {one.partition: end for one, end in (await consumer.end_offsets(wanted)).items()}
        except BusError as error:
            _log.debug("the watchdog cannot see", service=self._service, error=str(error))
            return None

    async def _start_anew(self, consumer: AIOKafkaConsumer, number: int) -> None:
        one, task = self._tasks[number]
        place = {"service": self._service, "topic": self._topic, "partition": number}
        seconds = self._bus.settings.watchdog_s
        if self._watchdog.given_up(number):
            raise Stuck(
                f"partition {number} of `{self._topic}` stands still for {self._service}: records wait at offset "
                f"{one.progress.next} and none was processed for {seconds:g} s (POLAR_KAFKA_WATCHDOG_S), also after "
                f"{self._bus.settings.watchdog_restarts} new starts; the process ends, for its supervisor to restart"
            )
        times = self._watchdog.restarted(number, self._bus.clock.monotonic())
        if self._metrics is not None:
            self._metrics.restarts.labels(str(number)).inc()
        _log.error("partition stands still and is started anew", **place, next=one.progress.next, times_in_a_row=times)
        task.cancel()
        _, late = await asyncio.wait([task], timeout=CANCEL_S)
        if late:
            raise Stuck(f"partition {number} of `{self._topic}` stands still for {self._service} and cannot be stopped")
        mine = TopicPartition(self._name, number) in consumer.assignment()
        if mine and self._tasks.get(number, (None, None))[1] is task:
            self._start(number, one)

    async def _compare(self, before: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
        """Partitions that others should have and that lag, with their cursors, for the next comparison.

        Raises:
            BusError: retryable: one has not moved since the last; the group may have lost it, a new membership helps.
        """
        others = {number for number in ends if number not in self._tasks and ends[number] > 0}
        if not others:
            return {}
        cursors = dict.fromkeys(others, 0)
        reader = await self._bus.reader(["cursors"], partitions={"cursors": sorted(others)})
        try:
            async for record in reader.to_end():
                if (
                    isinstance(record.value, Cursor)
                    and record.key == f"{self._service}/{self._topic}/{record.partition}"
                ):
                    cursors[record.partition] = record.value.next
        finally:
            await reader.close()
        lagging = {number: cursor for number, cursor in cursors.items() if cursor < ends[number]}
        orphans = sorted(number for number, cursor in lagging.items() if before.get(number) == cursor)
        if orphans:
            raise BusError(f"partitions {orphans} of `{self._topic}` lag and nobody works on them")
        return lagging

    async def _report(self, consumer: AIOKafkaConsumer) -> None:
        """Group offsets, which show lag in everybody's tools and decide nothing here."""
        assigned = consumer.assignment()
        offsets = {}
        for number, (one, _) in self._tasks.items():
            where = TopicPartition(self._name, number)
            if where in assigned and one.progress.committed is not None:
                offsets[where] = one.progress.committed
        if not offsets:
            return
        try:
            async with asyncio.timeout(OFFSETS_EVERY_S):
                await consumer.commit(offsets)
        except (KafkaError, TimeoutError) as error:
            _log.debug("group offsets not committed", service=self._service, error=repr(error))


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Tells the worker which partitions it has."""

    def __init__(self, gain: Callable[[list[int]], None], drop_all: Callable[[], Awaitable[None]]) -> None:
        self._gain = gain
        self._drop_all = drop_all

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        # rebalances are eager: all partitions go, also those that come back
        await self._drop_all()

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self._drop_all()  # what the watchdog may have started again in between
        self._gain(sorted(one.partition for one in assigned))


__all__ = ["PartitionTask", "PartitionWorker", "Processor", "Progress", "Send"]
