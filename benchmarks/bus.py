"""What Polar's own layer over aiokafka costs: the same work through `polar.bus` and through raw aiokafka, in one run.

    uv run --extra dev python benchmarks/bus.py            # the embedded broker
    KAFKA_BOOTSTRAP=HOST:PORT uv run …                     # and Apache Kafka

Both sides take turns, round by round, on the same topics of the same broker, with the same batch size, linger,
compression, acks and idempotence, and the same fetch sizes and isolation. Raw aiokafka sends and receives bytes that
were encoded before (the very bytes that Polar's side makes), so what is compared is all that Polar adds: MessagePack
both ways, checks against the topic table, records, references, time limits. What encoding and decoding alone take is
told beside it; reading is measured a second time with raw aiokafka's side decoding as well. Client, and the embedded
broker's client side, share one process and one loop, as in a service.
"""

import argparse
import asyncio
import gc
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import UnknownTopicOrPartitionError

from polar.broker import spawn
from polar.bus import Bus, BusSettings, Out, Transactional
from polar.bus.clients import stop_admin
from polar.bus.records import Encoded, encode_out
from polar.schemas import (
    BuildSummary,
    Choice,
    CompletionCaptured,
    Cursor,
    Engine,
    Logprobs,
    Prompt,
    RecordRef,
    Sampling,
    Stage,
    StageChanged,
    TokenIds,
)
from polar.schemas.topics import Service, topic
from polar.schemas.wire import decode, encode

PARTITIONS = 4
ROUNDS = 5
BURST = 500
"""Records that are sent, or asked for, at once."""
TRANSACTION_RECORDS = 10
TRANSACTIONS = 60
SINGLES = 300
AIM = 20


@dataclass
class Kind:
    """A sort of record."""

    name: str
    service: Service
    topic: str
    outs: list[Out]
    """What is sent in a round, again and again."""

    def encoded(self) -> list[Encoded]:
        return [encode_out(out, self.service) for out in self.outs]


def stage_event(number: int) -> Out:
    """About 1 KB: the report of a build."""
    session = f"{number % 97:08x}-0000-5000-8000-{number:012x}"
    event = StageChanged(
        session_id=session,
        task_id=str(uuid4()),
        attempt=1,
        stage=Stage.BUILT,
        at_ms=1_790_000_000_000 + number,
        node="gateway-7.cluster.local",
        assignment=str(uuid4()),
        built=RecordRef(topic="built", partition=3, offset=number),
        summary=BuildSummary(
            captured=51,
            failed=1,
            traces=3,
            trained_tokens=8123,
            prompt_tokens=31000,
            set_aside={f"reason_number_{one}": number + one for one in range(24)},
        ),
        timing_ms={f"{name}_ms": float(number % 7919) for name in ("queue", "init", "run", "build", "model", "grade")},
    )
    return Out("stages", session, event)


def completion(number: int, randomness: np.random.Generator) -> Out:
    """About 64 KB: 6,000 prompt ids, 2,500 sampled ones with their log-probabilities, and the text."""
    session = f"{number % 31:08x}-0000-5000-8000-000000000000"
    words = [f"word{one}" for one in randomness.integers(0, 50_000, 2_000)]
    event = CompletionCaptured(
        completion_id=str(uuid4()),
        session_id=session,
        attempt=1,
        task_id="t",
        group_id="g",
        sample=0,
        call=number,
        started_ms=1,
        ended_ms=2,
        dialect="openai.chat",
        request_sha256="0" * 64,
        prompt=Prompt(
            ids=TokenIds(randomness.integers(0, 150_000, 6_000)),
            messages=[{"role": "user", "content": " ".join(words)}],
        ),
        choices=[
            Choice(
                ids=TokenIds(randomness.integers(0, 150_000, 2_500)),
                logprobs=Logprobs(-randomness.random(2_500, dtype=np.float32)),
                message={"role": "assistant", "content": " ".join(words[:600])},
                finish="stop",
            )
        ],
        sampling_asked=Sampling(temperature=1.0),
        sampling=Sampling(temperature=1.0, top_p=1.0),
        engine=Engine(model="policy", endpoint="http://127.0.0.1:8000/v1"),
    )
    return Out("completions", session, event)


@dataclass
class Measured:
    """Rates or seconds of both sides, in pairs that were taken one after the other."""

    raw: list[float] = field(default_factory=list)
    polar: list[float] = field(default_factory=list)
    raw_cpu: list[float] = field(default_factory=list)
    """Seconds of this process's CPU for one."""
    polar_cpu: list[float] = field(default_factory=list)


@dataclass
class Subject:
    name: str
    settings: BusSettings
    rates: dict[str, Measured] = field(default_factory=dict)
    latencies: dict[str, Measured] = field(default_factory=dict)

    @asynccontextmanager
    async def bus(self, service: Service) -> AsyncIterator[Bus]:
        async with Bus(self.settings, service) as one:
            yield one

    async def producer(self, bus: Bus, transactional_id: str | None = None) -> AIOKafkaProducer:
        """Raw, and set as Polar's."""
        return await bus.clients.producer(transactional_id and self.settings.full(transactional_id))


async def raw_send(producer: AIOKafkaProducer, name: str, records: list[Encoded]) -> None:
    """As one writes it with aiokafka: keyed, all acknowledged."""
    futures = [await producer.send(name, one.value, key=one.key, headers=one.headers) for one in records]
    await asyncio.gather(*futures)


async def in_turns(
    measured: Measured, raw: Callable[[], Awaitable[int]], polar: Callable[[], Awaitable[int]], rounds: int
) -> None:
    """`raw` and `polar` return how many they did."""
    for number in range(rounds + 1):
        sides = [(measured.raw, measured.raw_cpu, raw), (measured.polar, measured.polar_cpu, polar)]
        for rates, spent, one in sides if number % 2 else reversed(sides):
            gc.collect()
            begun, before = time.perf_counter(), time.process_time()
            count = await one()
            cpu, took = time.process_time() - before, time.perf_counter() - begun
            if number:  # the first warms up
                rates.append(count / took)
                spent.append(cpu / count)


async def produce(subject: Subject, kind: Kind) -> None:
    name, encoded = subject.settings.full(kind.topic), kind.encoded()
    async with subject.bus(kind.service) as bus:
        producer = await subject.producer(bus)

        async def raw() -> int:
            for start in range(0, len(encoded), BURST):
                await raw_send(producer, name, encoded[start : start + BURST])
            return len(encoded)

        async def polar() -> int:
            for start in range(0, len(kind.outs), BURST):
                await bus.send(*kind.outs[start : start + BURST])
            return len(kind.outs)

        await in_turns(subject.rates.setdefault(f"produce, {kind.name}, records/s", Measured()), raw, polar, ROUNDS)
        await producer.stop()


async def consume(subject: Subject, kind: Kind, *, values: bool) -> None:
    """`values`: raw aiokafka's side decodes too, as whoever wants to know what was said has to."""
    name = subject.settings.full(kind.topic)
    types = topic(kind.topic).values
    async with subject.bus(kind.service) as bus:
        wanted = 2 * len(kind.outs)

        async def raw() -> int:
            consumer: AIOKafkaConsumer = await bus.clients.reading(committed=True)
            places = [TopicPartition(name, number) for number in range(bus.partitions(kind.topic))]
            starts = await consumer.beginning_offsets(places)
            consumer.assign(places)
            for place in places:
                consumer.seek(place, starts[place])
            count = 0
            while count < wanted:
                for messages in (await consumer.getmany(timeout_ms=200, max_records=BURST)).values():
                    count += len(messages)
                    if values:
                        _ = [decode(one.value, types) for one in messages]
            await consumer.stop()
            return count

        async def polar() -> int:
            reader = await bus.reader([kind.topic])
            count = 0
            while count < wanted:
                count += len(await reader.poll(max_records=BURST))
            await reader.close()
            return count

        label = f"consume, {kind.name}, records/s" + (" (both decode)" if values else " (raw: bytes)")
        await in_turns(subject.rates.setdefault(label, Measured()), raw, polar, ROUNDS)


async def transactions(subject: Subject, kind: Kind) -> None:
    """Ten records and a cursor, one transaction after the other, as a partition of builder or finisher."""
    name = subject.settings.full(kind.topic)
    async with subject.bus(Service.BUILDER) as bus:
        outs = kind.outs[:TRANSACTION_RECORDS]
        cursor = Out("cursors", "benchmark/stages/0", Cursor(next=1, replay_from=1), partition=0)
        encoded = [encode_out(out, Service.BUILDER) for out in outs]
        last = encode_out(cursor, Service.BUILDER)
        producer = await subject.producer(bus, "benchmark-raw")
        writer: Transactional = await bus.transactional("benchmark-polar")
        took = subject.latencies.setdefault("transaction of ten and a cursor, ms", Measured())

        async def raw() -> int:
            for _ in range(TRANSACTIONS):
                since = time.perf_counter()
                await producer.begin_transaction()
                await raw_send(producer, name, encoded)
                await producer.send_and_wait(
                    subject.settings.full("cursors"), last.value, key=last.key, headers=last.headers, partition=0
                )
                await producer.commit_transaction()
                took.raw.append(time.perf_counter() - since)
            return TRANSACTIONS

        async def polar() -> int:
            for _ in range(TRANSACTIONS):
                since = time.perf_counter()
                async with writer.transaction() as opened:
                    await opened.send(*outs)
                    await opened.send(cursor)
                took.polar.append(time.perf_counter() - since)
            return TRANSACTIONS

        await in_turns(subject.rates.setdefault("transactions/s, one writer", Measured()), raw, polar, ROUNDS)
        await producer.stop()


async def acknowledgements(subject: Subject, kind: Kind) -> None:
    name, encoded = subject.settings.full(kind.topic), kind.encoded()
    async with subject.bus(kind.service) as bus:
        producer = await subject.producer(bus)
        took = subject.latencies.setdefault(f"acknowledgement, {kind.name}, ms", Measured())
        for number in range(SINGLES + 50):
            one, out = encoded[number % len(encoded)], kind.outs[number % len(kind.outs)]
            begun = time.perf_counter()
            await producer.send_and_wait(name, one.value, key=one.key, headers=one.headers)
            between = time.perf_counter()
            await bus.send(out)
            if number >= 50:
                took.raw.append(between - begun)
                took.polar.append(time.perf_counter() - between)
        await producer.stop()


async def measure(subject: Subject, kinds: list[Kind]) -> None:
    async with subject.bus(Service.USER) as bus:
        await bus.prepare()
    for kind in kinds:
        sys.stderr.write(f"measuring: {subject.name}, {kind.name}\n")
        await produce(subject, kind)
        await consume(subject, kind, values=False)
        await consume(subject, kind, values=True)
        await acknowledgements(subject, kind)
    await transactions(subject, kinds[0])


async def drop(subject: Subject) -> None:
    async with subject.bus(Service.USER) as bus:
        admin = await bus.clients.admin()
        try:
            names = [one for one in await admin.list_topics() if one.startswith(subject.settings.topic_prefix)]
            await admin.delete_topics(names)
        except UnknownTopicOrPartitionError:
            pass  # gone already
        finally:
            await stop_admin(admin)


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def cost(raw: float, polar: float) -> str:
    """Polar's share of the time that its side takes; both are times here."""
    return f"{100 * (1 - raw / polar):+.0f} %"


def table(subjects: list[Subject]) -> str:
    lines = ["| broker | | raw aiokafka | Polar | Polar's layer |", "|---|---|---:|---:|---:|"]
    for subject in subjects:
        for name, one in subject.rates.items():
            raw, polar = statistics.median(one.raw), statistics.median(one.polar)
            lines.append(f"| {subject.name} | {name} | {raw:,.0f} | {polar:,.0f} | {cost(1 / raw, 1 / polar)} |")
            raw, polar = (statistics.median(values) * 1e6 for values in (one.raw_cpu, one.polar_cpu))
            lines.append(f"| | – this process's CPU for one, µs | {raw:,.0f} | {polar:,.0f} | {cost(raw, polar)} |")
        for name, one in subject.latencies.items():
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                raw, polar = percentile(one.raw, share), percentile(one.polar, share)
                cells = f"{raw * 1000:.2f} | {polar * 1000:.2f} | {cost(raw, polar)}"
                lines.append(f"| {subject.name} | {name}, {label} | {cells} |")
    return "\n".join(lines)


def coding(kind: Kind) -> str:
    """What MessagePack alone takes, both ways."""
    values = [out.value for out in kind.outs if out.value is not None]
    begun = time.perf_counter()
    data = [encode(one) for one in values]
    between = time.perf_counter()
    for one in data:
        decode(one, topic(kind.topic).values)
    ended = time.perf_counter()
    size = statistics.fmean(len(one) for one in data)
    return (
        f"{kind.name}: {size:,.0f} bytes; encoding {(between - begun) / len(data) * 1e6:.1f} µs, "
        f"decoding {(ended - between) / len(data) * 1e6:.1f} µs"
    )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}, "
        f"load average before the run {os.getloadavg()[0]:.1f}; {PARTITIONS} partitions, bursts of {BURST}, medians of "
        f"{ROUNDS} rounds; the layer's cost is its share of the time that Polar's side takes (aim: at most {AIM} %)"
    )


async def run(kafka: str | None) -> None:
    about = machine()
    randomness = np.random.default_rng(1)
    kinds = [
        Kind("1 KB stage events", Service.GATEWAY, "stages", [stage_event(number) for number in range(6_000)]),
        Kind("64 KB completions", Service.PROXY, "completions", [completion(one, randomness) for one in range(500)]),
    ]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        async with AsyncExitStack() as stack:
            broker = await stack.enter_async_context(await spawn(Path(scratch, "broker")))
            brokers = [("embedded", broker.bootstrap)] + ([("Apache Kafka", kafka)] if kafka else [])
            subjects = [
                Subject(
                    name,
                    BusSettings(
                        bootstrap=bootstrap,
                        topic_prefix=f"benchmark-{uuid4().hex[:8]}.",
                        partitions=PARTITIONS,
                        blob_url=Path(scratch, "blobs").as_uri(),
                    ),
                )
                for name, bootstrap in brokers
            ]
            for subject in subjects:
                stack.push_async_callback(drop, subject)
                await measure(subject, kinds)
    print(f"{about}\n\n{table(subjects)}\n")
    print("\n".join(f"- {coding(kind)}" for kind in kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description="What polar.bus costs over raw aiokafka, on each broker, in one run.")
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", default=os.environ.get("KAFKA_BOOTSTRAP"), help="an Apache Kafka that runs"
    )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    begun = time.perf_counter()
    uvloop.run(run(parser.parse_args().kafka))
    sys.stderr.write(f"took {time.perf_counter() - begun:.0f} s\n")


if __name__ == "__main__":
    main()
