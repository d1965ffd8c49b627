"""A worker that copies SOURCE to TARGET exactly once with plain aiokafka, for a test that kills it and the broker.

usage: python -m tests.broker.copier BOOTSTRAP SOURCE TARGET GROUP

The group only says which partitions are this worker's. Each is copied by a task of its own, with a transactional id of
its own, from the cursor that the last record of the partition in TARGET-cursors holds: written in the transaction of
what it covers, and read only once the producer's start has ended whatever the former owner left open.
"""

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError

BATCH = 10


class Copier:
    """Copies one partition until it is cancelled; begins anew after any error, as the broker may be away."""

    def __init__(self, bootstrap: str, source: str, target: str, partition: int) -> None:
        self._bootstrap = bootstrap
        self._source = TopicPartition(source, partition)
        self._target = target
        self._cursors = TopicPartition(f"{target}-cursors", partition)

    async def run(self) -> None:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    await self._copy(stack)
            except (KafkaError, TimeoutError) as error:
                print(f"{self._source}: again after {error!r}", flush=True)
                await asyncio.sleep(0.2)

    async def _copy(self, stack: AsyncExitStack) -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            transactional_id=f"copier-{self._source.topic}-{self._source.partition}",
            transaction_timeout_ms=8_000,
        )
        stack.push_async_callback(stop, producer)
        await producer.start()
        cursor = await self._read_cursor()
        consumer = await self._consumer(stack, self._source)
        consumer.seek(self._source, cursor)
        while True:
            records = (await consumer.getmany(timeout_ms=500, max_records=BATCH)).get(self._source, [])
            if not records:
                continue
            assert records[0].offset >= cursor
            cursor = records[-1].offset + 1
            async with producer.transaction():
                sends = [await producer.send(self._target, record.value, key=record.key) for record in records]
                sends.append(
                    await producer.send(
                        self._cursors.topic, b"%d" % cursor, key=b"c", partition=self._cursors.partition
                    )
                )
                await asyncio.gather(*sends)

    async def _consumer(self, stack: AsyncExitStack, partition: TopicPartition) -> AIOKafkaConsumer:
        # The default, latest, could overtake a seek that comes before the first fetch.
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        stack.push_async_callback(stop, consumer)
        await consumer.start()
        consumer.assign([partition])
        return consumer

    async def _read_cursor(self) -> int:
        async with asyncio.timeout(20), AsyncExitStack() as stack:
            consumer = await self._consumer(stack, self._cursors)
            end = (await consumer.end_offsets([self._cursors]))[self._cursors]
            cursor = 0
            while await consumer.position(self._cursors) < end:
                for record in (await consumer.getmany(timeout_ms=200)).get(self._cursors, []):
                    cursor = int(record.value)
            return cursor


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    try:
        await asyncio.wait_for(client.stop(), 3)
    except (KafkaError, TimeoutError) as error:
        # Fenced or cut off: what it left open ends with the next owner's producer, or with its time.
        print(f"stopping: {error!r}", flush=True)


class Owned(ConsumerRebalanceListener):  # type: ignore[misc]
    """The tasks of the partitions that the group gave to this worker."""

    def __init__(self, bootstrap: str, source: str, target: str) -> None:
        self._where = bootstrap, source, target
        self._tasks: list[asyncio.Task[None]] = []

    async def on_partitions_revoked(self, revoked: object) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        copiers = [Copier(*self._where, each.partition) for each in assigned]
        self._tasks = [asyncio.create_task(copier.run()) for copier in copiers]


async def main(bootstrap: str, source: str, target: str, group: str) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    owned = Owned(bootstrap, source, target)
    while True:
        membership = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=1_000,
            max_poll_interval_ms=3_600_000,  # nothing is ever polled of it: members beat by themselves
        )
        membership.subscribe([source], listener=owned)
        try:
            await membership.start()
            break
        except KafkaError as error:
            print(f"joining: again after {error!r}", flush=True)
            await stop(membership)
            await asyncio.sleep(0.2)
    await stopping.wait()
    await owned.on_partitions_revoked(())
    await stop(membership)


if __name__ == "__main__":
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is what this is about
    asyncio.run(main(*sys.argv[1:5]))
