"""The embedded broker beside Apache Kafka, in one run: rates, latencies, start, memory, and what idling costs.

    uv run --extra dev python benchmarks/broker.py [--kafka HOST:PORT | --kafka-start COMMAND]

Both are asked the same by the same client (aiokafka on uvloop, one process), one after the other, so on few cores the
client is what limits the rates: the CPU a broker spent itself is told beside them. Takes less than two minutes. CPU,
memory and start are told of brokers on this machine only (Linux, /proc).
"""

import argparse
import asyncio
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from polar.broker import spawn

PARTITIONS = 4
VALUE_BYTES = 1_000
ROUND_RECORDS = 30_000
ROUNDS = 3
ACKS = 2_000
TRANSACTIONS = 200
TRANSACTION_RECORDS = 10
WRITERS = 8
WARM_UP_RECORDS = 10_000
"""Apache Kafka's virtual machine compiles what it runs often; its first records are several times slower."""
IDLE_S = 20.0
PHASE_LIMIT_S = 25.0
"""What takes longer ends the run with an error rather than keep it for minutes."""


@dataclass
class Process:
    """What Linux knows of a process."""

    pid: int

    def cpu_s(self) -> float:
        """Seconds on a CPU, in user and kernel mode, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Resident memory now."""
        return self._status("VmRSS") / 1024

    def peak_mb(self) -> float:
        return self._status("VmHWM") / 1024

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise LookupError(name)


def process_listening_on(port: int) -> Process | None:
    """Whoever listens on a TCP port of this machine; None when that cannot be seen from here."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in inodes:
                return Process(int(descriptor.parts[2]))
        except OSError:
            continue  # gone meanwhile, or another user's
    return None


@dataclass
class Subject:
    """A broker that runs, and what was measured of it. A result that is missing could not be measured."""

    name: str
    bootstrap: str
    process: Process | None
    results: dict[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def topic(self) -> AsyncIterator[str]:
        name = f"benchmark-{uuid4().hex[:12]}"
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            response = await admin.create_topics([NewTopic(name, PARTITIONS, 1)])
            assert [error[1] for error in response.topic_errors] == [0], response
            yield name
            await admin.delete_topics([name])
        finally:
            await admin.close()

    @asynccontextmanager
    async def producer(self, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
        # As Polar's own producers are set, but for the compression of what cannot be compressed.
        producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap, enable_idempotence=True, acks="all", max_batch_size=256 * 1024, **options
        )
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()

    @asynccontextmanager
    async def consumer(self, topic: str, **options: Any) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=self.bootstrap, auto_offset_reset="earliest", enable_auto_commit=False, **options
        )
        await consumer.start()
        try:
            yield consumer
        finally:
            await consumer.stop()


async def produce(subject: Subject, topic: str, count: int, linger_ms: int = 5) -> float:
    """Records per second, from the first send to the last acknowledgement."""
    value = os.urandom(VALUE_BYTES)
    async with subject.producer(linger_ms=linger_ms) as producer:
        start = time.perf_counter()
        sends = [await producer.send(topic, value, partition=index % PARTITIONS) for index in range(count)]
        await asyncio.gather(*sends)
        return count / (time.perf_counter() - start)


async def consume(subject: Subject, topic: str, count: int) -> float:
    """Records per second of a new reader, from its first poll on."""
    async with subject.consumer(topic, max_partition_fetch_bytes=4 << 20) as consumer:
        left, start = count, time.perf_counter()
        while left > 0:
            for batch in (await consumer.getmany(timeout_ms=500)).values():
                left -= len(batch)
        return count / (time.perf_counter() - start)


async def acknowledgements(subject: Subject, topic: str) -> list[float]:
    """Seconds until each of a row of single records was acknowledged."""
    value = os.urandom(VALUE_BYTES)
    took = []
    async with subject.producer(linger_ms=0) as producer:
        for index in range(ACKS + 200):
            start = time.perf_counter()
            await producer.send_and_wait(topic, value, partition=index % PARTITIONS)
            took.append(time.perf_counter() - start)
    return took[200:]


async def transactions(subject: Subject, topic: str, count: int) -> list[float]:
    """Seconds of each transaction of one producer: ten records, and an offset of a group."""
    value = os.urandom(VALUE_BYTES)
    name = f"benchmark-{uuid4().hex[:12]}"
    took = []
    async with subject.producer(transactional_id=name, transaction_timeout_ms=30_000) as producer:
        for index in range(count + 5):
            start = time.perf_counter()
            async with producer.transaction():
                for number in range(TRANSACTION_RECORDS):
                    await producer.send(topic, value, partition=number % PARTITIONS)
                await producer.send_offsets_to_transaction({TopicPartition(topic, 0): index}, name)
            took.append(time.perf_counter() - start)
    return took[5:]


async def many_writers(subject: Subject, topic: str) -> float:
    """Transactions per second of several producers at once."""
    each = TRANSACTIONS // WRITERS
    start = time.perf_counter()
    await asyncio.gather(*(transactions(subject, topic, each) for _ in range(WRITERS)))
    return (each + 5) * WRITERS / (time.perf_counter() - start)


async def idle(subject: Subject) -> None:
    """What a broker spends while one consumer in a group waits on it and nothing comes."""
    async with subject.topic() as topic, subject.consumer(topic, group_id=topic) as consumer:
        waiting = asyncio.create_task(consumer.getmany(timeout_ms=int((IDLE_S + 60) * 1000)))
        await asyncio.sleep(3)  # joining is not idling
        if subject.process is not None:
            before = subject.process.cpu_s()
            await asyncio.sleep(IDLE_S)
            spent = subject.process.cpu_s() - before
            subject.results["CPU of an idle broker with an idle consumer, s/min"] = f"{spent * 60 / IDLE_S:.2f}"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


async def measure(subject: Subject) -> None:
    """All but the idling."""
    results, process = subject.results, subject.process
    if process is not None:
        results["memory at start, MB"] = f"{process.memory_mb():.0f}"

    async with subject.topic() as topic:
        await asyncio.wait_for(produce(subject, topic, WARM_UP_RECORDS), PHASE_LIMIT_S)
        await asyncio.wait_for(transactions(subject, topic, 20), PHASE_LIMIT_S)
    async with subject.topic() as topic:
        before = process.cpu_s() if process is not None else 0.0
        rates = [await asyncio.wait_for(produce(subject, topic, ROUND_RECORDS), PHASE_LIMIT_S) for _ in range(ROUNDS)]
        results["produce, records/s"] = f"{statistics.median(rates):,.0f}"
        if process is not None:
            spent = (process.cpu_s() - before) * 100_000 / (ROUND_RECORDS * ROUNDS)
            results["the broker's CPU for 100,000 produced, s"] = f"{spent:.2f}"
            before = process.cpu_s()
        stored = ROUND_RECORDS * ROUNDS
        rates = [await asyncio.wait_for(consume(subject, topic, stored), PHASE_LIMIT_S) for _ in range(ROUNDS)]
        results["consume, records/s"] = f"{statistics.median(rates):,.0f}"
        if process is not None:
            spent = (process.cpu_s() - before) * 100_000 / (stored * ROUNDS)
            results["the broker's CPU for 100,000 consumed, s"] = f"{spent:.2f}"
        took = await asyncio.wait_for(acknowledgements(subject, topic), PHASE_LIMIT_S)
        results["acknowledgement p50, ms"] = f"{percentile(took, 0.5) * 1000:.2f}"
        results["acknowledgement p99, ms"] = f"{percentile(took, 0.99) * 1000:.2f}"
        took = await asyncio.wait_for(transactions(subject, topic, TRANSACTIONS), PHASE_LIMIT_S)
        results["transactions/s, one producer"] = f"{1 / statistics.fmean(took):,.0f}"
        results["transaction p50, ms"] = f"{percentile(took, 0.5) * 1000:.1f}"
        results["transaction p99, ms"] = f"{percentile(took, 0.99) * 1000:.1f}"
        rate = await asyncio.wait_for(many_writers(subject, topic), PHASE_LIMIT_S)
        results[f"transactions/s, {WRITERS} producers"] = f"{rate:,.0f}"
    if process is not None:
        results["memory after the load, MB"] = f"{process.memory_mb():.0f}"
        results["memory at most, MB"] = f"{process.peak_mb():.0f}"


START = "start until it answers, s"
START_AGAIN = "start again after SIGKILL, s"


async def embedded(stack: AsyncExitStack, directory: Path, name: str, *options: str) -> Subject:
    start = time.perf_counter()
    broker = await stack.enter_async_context(await spawn(directory, *options))
    subject = Subject(name, broker.bootstrap, Process(broker.pid))
    subject.results[START] = f"{time.perf_counter() - start:.2f}"
    return subject


async def start_again(directory: Path, subject: Subject) -> None:
    """How long recovery takes: a broker with 90 MB of records is killed and started."""
    async with await spawn(directory) as broker:
        other = Subject("", broker.bootstrap, None)
        async with AsyncExitStack() as stack:
            topic = await stack.enter_async_context(other.topic())
            await produce(other, topic, ROUND_RECORDS * ROUNDS)
            await broker.kill()
            start = time.perf_counter()
            await broker.start()
            subject.results[START_AGAIN] = f"{time.perf_counter() - start:.2f}"


async def kafka_of_our_own(stack: AsyncExitStack, command: str) -> Subject:
    """Apache Kafka by a command that prints KAFKA_BOOTSTRAP=HOST:PORT when it answers; ended with the run."""
    start = time.perf_counter()
    arguments = shlex.split(command)
    started = await asyncio.to_thread(subprocess.run, arguments, stdout=subprocess.PIPE, text=True, check=True)
    took = time.perf_counter() - start
    subject = named(started.stdout.rpartition("KAFKA_BOOTSTRAP=")[2].split()[0])
    subject.results[START] = f"{took:.2f}"
    if subject.process is not None:
        stack.callback(os.kill, subject.process.pid, 15)
    return subject


def named(bootstrap: str) -> Subject:
    return Subject("Apache Kafka", bootstrap, process_listening_on(int(bootstrap.rpartition(":")[2])))


def table(subjects: list[Subject]) -> str:
    """Markdown, one column for each broker."""
    rows = list(dict.fromkeys(row for subject in subjects for row in subject.results))
    # What was found out last belongs beside what it is compared with.
    order = sorted(rows, key=lambda row: (row != START, row != START_AGAIN, not row.startswith("memory")))
    lines = ["| | " + " | ".join(subject.name for subject in subjects) + " |", "|---" * (len(subjects) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(each.results.get(row, "–") for each in subjects) + " |" for row in order]
    return "\n".join(lines)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}, "
        f"load average before the run {load:.1f}; records of {VALUE_BYTES:,} bytes, {PARTITIONS} partitions, "
        f"transactions of {TRANSACTION_RECORDS} records and an offset"
    )


async def run(arguments: argparse.Namespace) -> None:
    about = machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        async with AsyncExitStack() as stack:
            subjects = [
                await embedded(stack, Path(scratch, "plain"), "embedded"),
                await embedded(stack, Path(scratch, "fsync"), "embedded, --fsync", "--fsync"),
            ]
            if arguments.kafka_start:
                subjects.append(await kafka_of_our_own(stack, arguments.kafka_start))
            elif arguments.kafka:
                subjects.append(named(arguments.kafka))
            for subject in subjects:
                sys.stderr.write(f"measuring: {subject.name}\n")
                await measure(subject)
            await start_again(Path(scratch, "again"), subjects[0])
            sys.stderr.write(f"idling for {IDLE_S:.0f} s\n")
            # At once: what does nothing is not in the way of another.
            await asyncio.gather(*(idle(subject) for subject in subjects))
    print(f"{about}\n\n{table(subjects)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The embedded broker beside Apache Kafka, in one run.")
    kafka = parser.add_mutually_exclusive_group()
    kafka.add_argument("--kafka", metavar="HOST:PORT", help="an Apache Kafka that runs")
    kafka.add_argument(
        "--kafka-start", metavar="COMMAND", help="a command that starts one and prints KAFKA_BOOTSTRAP=HOST:PORT"
    )
    # Clients tell of what they try again: a partition without a leader yet, a broker that is started again.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    start = time.perf_counter()
    uvloop.run(run(parser.parse_args()))
    sys.stderr.write(f"took {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
