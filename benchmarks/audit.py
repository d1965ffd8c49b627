"""`polar audit` on a log of a million records: how fast, and in how much memory.

    uv run --extra dev python benchmarks/audit.py [--records N] [--kafka HOST:PORT] [--reply-ids N]

Writes a log that is right (the tests' model: sessions of some attempts, calls with delta prompts, fences, late calls;
built by the real builder, ended by the real finisher) to the embedded broker, unless --kafka names another one, and
runs the command on it, with and without the proof of tokens. Writing takes longer than auditing: the model builds every
session.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiokafka import AIOKafkaProducer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from polar.broker import spawn  # noqa: E402
from polar.bus import Bus, BusSettings  # noqa: E402
from polar.schemas import encode, headers  # noqa: E402
from polar.schemas.topics import Service  # noqa: E402
from tests.audit.model import CallPlan, LogModel, SessionPlan, TaskPlan  # noqa: E402

CALLS = (CallPlan(),) * 12
GROUP = (
    SessionPlan(attempts=(CALLS,), reward=0.5),
    SessionPlan(attempts=(CALLS,), strategy="per_request"),
    SessionPlan(attempts=((CallPlan(), CallPlan(ending="late_end")), CALLS), late_calls=1),
    SessionPlan(attempts=((*CALLS, CallPlan(ending="failed"), CallPlan(ending="open")),)),
)
TASKS = 40
"""Whose sessions interleave at a time."""


async def write(bus: Bus, count: int, reply_ids: int) -> tuple[int, int]:
    """Fills the log; records and bytes of their values."""
    settings = bus.settings
    producer = AIOKafkaProducer(
        bootstrap_servers=settings.bootstrap,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        max_batch_size=256 * 1024,
        max_request_size=settings.max_record_bytes,
    )
    await producer.start()
    written = size = 0
    model: LogModel | None = None
    started = time.monotonic()
    try:
        while written < count:
            model = LogModel(
                [TaskPlan(sessions=GROUP)] * TASKS,
                written,
                where=bus.partition_of,
                gaps=False,
                reply_ids=reply_ids,
                start_ms=int(time.time() * 1000) - count - 3_600_000,
                after=model,
            ).run()
            sent = []
            for one in model.records:
                value = None if one.value is None else encode(one.value)
                found = [] if one.value is None else headers(one.value, source=one.source)
                size += len(value or b"")
                future = await producer.send(
                    settings.full(one.topic),
                    value=value,
                    key=one.key.encode(),
                    partition=one.partition,
                    timestamp_ms=one.at_ms,
                    headers=found,
                )
                sent.append((future, one.offset))
            for future, offset in sent:
                assert (await future).offset == offset, "the model knows where its records stand"
            written += len(sent)
            model.records.clear()
            print(f"\r{written:,} records written in {time.monotonic() - started:.0f} s", end="", file=sys.stderr)
    finally:
        await producer.stop()
    print(file=sys.stderr)
    return written, size


def audited(settings: BusSettings, *options: str) -> tuple[dict[str, object], float, float, float]:
    """The command's report, its seconds, those on a CPU, and its peak memory in MiB."""
    env = {
        **os.environ,
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
    }
    started = time.monotonic()
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", "polar.cli.main", "audit", "--json", *options]
        process = subprocess.Popen(command, env=env, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        out.seek(0)
        text = out.read()
    assert os.waitstatus_to_exitcode(status) == 0, text[:2000]
    return json.loads(text), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


@asynccontextmanager
async def broker(named: str | None, folder: Path) -> AsyncIterator[str]:
    if named is not None:
        yield named
        return
    async with await spawn(folder) as one:
        yield one.bootstrap


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--reply-ids", type=int, default=60, help="most ids of a reply")
    parser.add_argument("--kafka", help="host:port of a broker; default: an embedded one")
    arguments = parser.parse_args()
    columns = ("run", "records", "MB", "seconds", "CPU s", "records/s", "peak MiB", "calls", "tokens compared")
    table = Table(*columns, title="polar audit")
    with tempfile.TemporaryDirectory() as folder:
        async with broker(arguments.kafka, Path(folder)) as bootstrap:
            settings = BusSettings(
                bootstrap=bootstrap, topic_prefix=f"bench-{uuid.uuid4().hex[:8]}.", blob_url=Path(folder).as_uri()
            )
            async with Bus(settings, Service.USER) as bus:
                await bus.prepare()
                _, size = await write(bus, arguments.records, arguments.reply_ids)
            for name, options in (("with tokens", ()), ("--no-tokens", ("--no-tokens",))):
                report, seconds, cpu, memory = await asyncio.to_thread(audited, settings, *options)
                counts = report["counts"]
                assert isinstance(counts, dict)
                table.add_row(
                    name,
                    f"{counts['records']:,}",
                    f"{size / 1e6:,.0f}",
                    f"{seconds:.1f}",
                    f"{cpu:.1f}",
                    f"{counts['records'] / seconds:,.0f}",
                    f"{memory:.0f}",
                    f"{counts['calls']:,}",
                    f"{counts.get('sampled_tokens', 0):,}",
                )
    Console(width=120).print(table)


if __name__ == "__main__":
    asyncio.run(main())
