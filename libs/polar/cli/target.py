"""Where trajectories go that are published again: a topic that is not one of Polar's own, or a file.

Promises: bytes are written as they were given; a topic's record is acknowledged by all in-sync replicas when `flush`
returns, in order per key; a file has its name only once it is whole.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import MessageSizeTooLargeError, RecordListTooLargeError, for_code

from polar.bus import Bus, BusError, BusSettings
from polar.bus.clients import Clients, stop_admin, stop_producer
from polar.bus.errors import translate, translated
from polar.bus.topics import ensure_topics
from polar.client.files import frame
from polar.schemas import GroupClosed, Trajectory, decode, to_json_bytes
from polar.schemas.topics import TABLE, topic

from .output import BAD_INPUT, fail

Headers = list[tuple[str, bytes]]

UNDERWAY_RECORDS: Final = 1_000
UNDERWAY_BYTES: Final = 32 * 1024 * 1024
"""Sent and not acknowledged, at most."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")


class Target(Protocol):
    """Takes records."""

    count: int

    async def put(self, key: str | None, value: bytes, headers: Headers) -> None: ...

    def told(self) -> str:
        """What it is, for people."""
        ...


def check_topic_name(name: str, settings: BusSettings, option: str = "--to-topic") -> None:
    """Ends with exit code 2 where trajectories may not be written to `name`, a topic as the broker knows it."""
    if not _NAME.match(name) or name in (".", ".."):
        fail(f"{option} {name!r}: a topic's name has up to 249 letters, digits and . _ -", code=BAD_INPUT)
    if name.startswith("__"):
        fail(f"{option} {name}: names that begin with __ are Kafka's own", code=BAD_INPUT)
    for spec in TABLE:
        if name == settings.full(spec.name):
            fail(
                f"{option} {name} is one of Polar's own topics, whose records the services write exactly once: what is "
                "published again would be counted twice",
                code=BAD_INPUT,
                hint=f"choose another name, such as {settings.topic_prefix}again, which is made where it is missing",
            )


async def settings_of(bus: Bus, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The settings of topics, by their full names.

    Raises:
        BusError: the broker does not tell.
    """
    admin = await bus.clients.admin()
    try:
        with translated("describing topics"):
            answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, one) for one in names])
    finally:
        await stop_admin(admin)
    found: dict[str, dict[str, str]] = {}
    for answer in answers:
        for code, message, _, name, entries, *_ in answer.resources:
            if code:
                raise translate(for_code(code)(message), f"describing topic {name}")
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


class TopicTarget:
    """A topic, through an idempotent producer. Made by `to_topic`."""

    def __init__(self, bus: Bus, name: str, producer: AIOKafkaProducer, *, made: bool, partitions: int) -> None:
        self._settings = bus.settings
        self._producer = producer
        self._underway: list[tuple[asyncio.Future[Any], int]] = []
        self._bytes = 0
        self.name = name
        self.made = made
        self.partitions = partitions
        self.count = 0
        """Acknowledged."""

    async def put(self, key: str | None, value: bytes, headers: Headers) -> None:
        """Sends a record; waits while too much is under way.

        Raises:
            BusError: this or an earlier record was refused, or not acknowledged within `delivery_timeout_s`.
        """
        while self._underway and (len(self._underway) >= UNDERWAY_RECORDS or self._bytes > UNDERWAY_BYTES):
            await self._oldest()
        with translated(f"sending to {self.name}"):
            async with asyncio.timeout(self._settings.delivery_timeout_s):
                future = await self._producer.send(
                    self.name, value=value, key=None if key is None else key.encode(), headers=headers
                )
        self._underway.append((future, len(value)))
        self._bytes += len(value)

    async def flush(self) -> None:
        """Waits until every record is acknowledged. Raises as `put`."""
        while self._underway:
            await self._oldest()

    def told(self) -> str:
        return f"topic {self.name} ({self.partitions} partitions{', made now' if self.made else ''})"

    async def _oldest(self) -> None:
        future, size = self._underway.pop(0)
        self._bytes -= size
        with translated(f"sending to {self.name}"):
            try:
                async with asyncio.timeout(self._settings.delivery_timeout_s):
                    await future
            except (MessageSizeTooLargeError, RecordListTooLargeError):
                raise BusError(
                    f"{self.name} refuses a record of {size} bytes: raise its max.message.bytes to that of "
                    f"{self._settings.full('trajectories')}",
                    retryable=False,
                ) from None
        self.count += 1

    def abandon(self) -> None:
        """What is under way may fail unseen: the command has failed already."""
        for future, _ in self._underway:
            future.add_done_callback(lambda one: one.cancelled() or one.exception())


@asynccontextmanager
async def to_topic(bus: Bus, name: str) -> AsyncIterator[TopicTarget]:
    """A topic to write to, made with the settings of `trajectories` where it is missing; flushed at the end.

    Ends with exit code 2 where the topic is compacted: of a group's trajectories it would keep the last only.

    Raises:
        BusError: the topic cannot be made or written.
    """
    plain = Clients(bus.settings.model_copy(update={"topic_prefix": ""}), "republish")
    made = await ensure_topics(plain, [topic("trajectories")._replace(name=name)])
    if not made:
        found = (await settings_of(bus, [name])).get(name, {})
        if "compact" in found.get("cleanup.policy", ""):
            fail(
                f"topic {name} is compacted: of each group it would keep the last record only",
                code=BAD_INPUT,
                hint="name another topic, or set its cleanup.policy to delete",
            )
    producer = await bus.clients.producer()
    try:
        with translated(f"looking at {name}"):
            partitions = len(await producer.partitions_for(name))
        target = TopicTarget(bus, name, producer, made=bool(made), partitions=partitions)
        try:
            yield target
        except BaseException:
            target.abandon()
            raise
        await target.flush()
    finally:
        await stop_producer(producer)


class FileTarget:
    """A file, `.jsonl` or `.msgpack`. Made by `to_file`."""

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle
        self.count = 0

    async def put(self, key: str | None, value: bytes, headers: Headers) -> None:
        """Raises `BusError` where the disk does not take it."""
        if self._path.suffix == ".jsonl":
            data = to_json_bytes(decode(value, (Trajectory, GroupClosed))) + b"\n"
        else:
            data = frame(value)
        try:
            await asyncio.to_thread(self._handle.write, data)
        except OSError as error:
            raise BusError(f"cannot write {self._path}: {error.strerror}", retryable=False) from error
        self.count += 1

    def told(self) -> str:
        return str(self._path)


def check_file_name(path: Path, option: str = "--to-file") -> None:
    """Ends with exit code 2 where it is of no kind known here, or there already."""
    if path.suffix not in (".jsonl", ".msgpack"):
        fail(f"{option} {path} ends neither in .jsonl nor in .msgpack", code=BAD_INPUT)
    if path.exists():
        fail(f"{option} {path} is there already", code=BAD_INPUT, hint="remove it, or name another file")


@asynccontextmanager
async def to_file(path: Path) -> AsyncIterator[FileTarget]:
    """A file to write to; until the end it is `PATH.partial`, and that stays behind where the work failed. A file in
    which nothing would be is not made.

    Raises:
        BusError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        handle = await asyncio.to_thread(partial.open, "wb")
    except OSError as error:
        raise BusError(f"cannot write {partial}: {error.strerror}", retryable=False) from error
    try:
        target = FileTarget(path, handle)
        yield target
        await asyncio.to_thread(_finish, handle, partial, path if target.count else None)
    except OSError as error:
        raise BusError(f"cannot write {path}: {error.strerror}", retryable=False) from error
    finally:
        await asyncio.to_thread(handle.close)


def _finish(handle: Any, partial: Path, path: Path | None) -> None:
    handle.flush()
    os.fsync(handle.fileno())
    handle.close()
    if path is None:
        partial.unlink()
    else:
        partial.replace(path)
