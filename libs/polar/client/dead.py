"""Dead letters: what could not be processed, and what an operator did about it. All of it is on `polar.dead`.

Promises:
- A letter's state is on the log: a `DeadResolved` behind it says that it was retried or dropped, so operators agree.
- A retry is one transaction: the original bytes at the end of the record's own topic and partition, and the
  `DeadResolved` that says where. All retries use one transactional id, and the state is read after it was taken over:
  of two operators one retries, the other is refused.
- What may be retried is a matter of the topic (`RETRY`): a copy further on in the log must mean what the original
  meant, and must not end a session twice.

Numbers: a letter is known by its offset in `polar.dead`, which has one partition.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from polar.bus import Bus, BusError, Out, Reader, RecordGone
from polar.bus.bus import DEAD_INLINE, DEAD_KEY
from polar.bus.clients import stop_producer
from polar.bus.errors import Fenced, translated
from polar.bus.records import decode_record, encode_out
from polar.schemas import (
    DeadLetter,
    DeadResolved,
    Event,
    RecordRef,
    SessionGraded,
    SessionResult,
    StageChanged,
)
from polar.schemas.topics import Service, topic
from polar.schemas.validation import Refused, parse

WRITER = "dead-operator"
"""The one transactional id of those who retry and drop."""
MAX_READ = 20_000
"""Newest records of `polar.dead` that a count looks at: a letter may hold 64 KiB."""


class DeadRefused(ValueError):
    """What was asked for is not done; the message says why, and what to do instead."""


class Retry(NamedTuple):
    """What a retry of a record of some topic means."""

    effect: str
    """What happens; where it is refused: why."""
    allowed: bool = False
    again: bool = False
    """Whether `--force` may repeat one."""


_STATE = "each record is its writer's newest word under its key; an old one would stand over a newer one"
_ANEW = "the scheduler assigns anew what a node did not take, so the old record would start the work a second time"
_OUT = "nothing consumes it further: its readers take each record once, and a copy would be a second outcome"
RETRY: dict[str, Retry] = {
    "tasks": Retry(
        "the scheduler considers the request again. A task that was accepted meanwhile under its id is answered, not "
        "run again; forced twice, a task without an id runs twice",
        allowed=True,
        again=True,
    ),
    "stages": Retry(
        "the scheduler takes the report as one that comes late: it counts if its attempt and assignment are still the "
        "current ones, and is ignored otherwise",
        allowed=True,
        again=True,
    ),
    "graded": Retry(
        "the finisher publishes the trajectory that this session still lacks. Refused where the session has a result, "
        "and never done twice: a second one would be a second trajectory",
        allowed=True,
    ),
    "built": Retry("grades refer to built records by their place; at another place nothing would refer to it"),
    "completions": Retry(
        "what a session is built from is the order of its records: a copy further on opens, closes or counts something "
        "else. The original stays where it is: `polar rebuild --session` reads it there with a version that can"
    ),
    "assignments": Retry(_ANEW),
    "ready": Retry(_ANEW),
    "leases": Retry(_STATE),
    "nodes": Retry(_STATE),
    "control": Retry(_STATE),
    "policy": Retry(_STATE),
    "cursors": Retry(_STATE),
    "trajectories": Retry(_OUT),
    "rewards": Retry(_OUT),
    "results": Retry(_OUT),
    "dead": Retry("it is a letter itself"),
}


class Dead(NamedTuple):
    """A letter and what became of it."""

    number: int
    letter: DeadLetter
    """Without its bytes in listings."""
    resolved: DeadResolved | None = None

    @property
    def state(self) -> str:
        """`open`, `retried` or `dropped`."""
        return "open" if self.resolved is None else self.resolved.action

    @property
    def ref(self) -> RecordRef:
        return RecordRef(topic="dead", partition=0, offset=self.number)


class Listed(NamedTuple):
    letters: list[Dead]
    """The newest that fit, oldest first."""
    more: int
    """Older ones that fit and are left out."""


class Content(NamedTuple):
    """A dead record's bytes."""

    raw: bytes
    whole: bool
    """False: only its first bytes are left."""
    problem: str | None
    """Why the rest is missing."""
    event: Event | None
    """The record decoded, as far as that works now."""
    error: str | None
    """Why it does not."""


async def listed(
    bus: Bus,
    *,
    topic_name: str | None = None,
    since_ms: int | None = None,
    limit: int = 50,
    open_only: bool = False,
) -> Listed:
    """Letters about records of a topic, written since a time; the newest `limit`."""
    found = await _read(bus, "earliest" if since_ms is None else since_ms)
    fitting = [
        one
        for one in found.values()
        if (topic_name is None or one.letter.origin.topic == topic_name) and not (open_only and one.resolved)
    ]
    return Listed(fitting[-limit:], max(0, len(fitting) - limit))


async def count_open(bus: Bus) -> int:
    """Letters that nobody has dealt with, among the newest `MAX_READ` records."""
    return sum(one.resolved is None for one in (await _read(bus, "earliest", most=MAX_READ)).values())


async def find(bus: Bus, number: int) -> Dead:
    """A letter with its bytes.

    Raises:
        DeadRefused: there is none of that number.
    """
    nothing = f"there is no dead letter {number}; those there are: polar dead list"
    place = RecordRef(topic="dead", partition=0, offset=number)
    async with _reading(bus, {("dead", 0): 0}) as reader:
        if not 0 <= number < (await reader.ends())["dead", 0]:
            raise DeadRefused(nothing)
    try:
        letter = (await bus.lookup(place)).value
        known = (await _read(bus, {("dead", 0): number})).get(number)
    except RecordGone:
        raise DeadRefused(nothing) from None
    if not isinstance(letter, DeadLetter):
        raise DeadRefused(nothing)
    return Dead(number, letter, known.resolved if known else None)


async def content(bus: Bus, letter: DeadLetter) -> Content:
    """The dead record's bytes, fetched where they are a claim, and what they decode to now."""
    raw, whole, problem = letter.value, letter.whole is None, None
    if letter.whole is not None:
        try:
            raw, whole = await bus.blobs.get(letter.whole), True
        except (BusError, OSError) as error:
            problem = f"only the first {DEAD_INLINE} bytes are left: {error}"
    if not whole:
        return Content(raw, whole, problem, None, "not all of it is there")
    event, error_text = decoded(letter, raw)
    return Content(raw, whole, problem, event, error_text)


def decoded(letter: DeadLetter, raw: bytes) -> tuple[Event | None, str | None]:
    """The value of a dead record, or why it is not readable. Pure."""
    origin = letter.origin
    message = SimpleNamespace(
        partition=origin.partition,
        offset=origin.offset,
        timestamp=letter.at_ms,
        key=letter.key,
        value=raw,
        headers=tuple(letter.headers.items()),
    )
    try:
        spec = topic(origin.topic)
    except KeyError as error:
        return None, str(error)
    if origin.topic == "tasks" and raw.lstrip()[:1] in (b"{", b"["):
        try:
            return parse(raw), None
        except Refused as refused:
            return None, str(refused)
    record = decode_record(spec, message)
    if record.value is not None:
        return record.value, None
    return None, str(record.error) if record.error is not None else "it is empty"


async def retry(bus: Bus, number: int, *, force: bool = False, by: str = "") -> RecordRef:
    """Publish a dead record again, at the end of its own partition; its new place.

    Args:
        force: also where it does not decode now, and once more where it was dealt with (see `Retry.again`).
        by: who did it, for the log.

    Raises:
        DeadRefused: there is no such letter, or it must not be retried; nothing was written.
        Fenced: another operator was at it at the same moment; nothing was written.
    """
    async with _operating(bus) as producer:
        dead = await find(bus, number)
        letter, origin = dead.letter, dead.letter.origin
        found = await content(bus, letter)
        await _check(bus, dead, found, force)
        key = letter.key
        if key is not None and len(key) >= DEAD_KEY:
            raise DeadRefused(f"the key of letter {number} was cut off at {DEAD_KEY} bytes: write the record anew")
        if origin.partition >= bus.partitions(origin.topic):
            raise DeadRefused(f"`{origin.topic}` has no partition {origin.partition} any more")
        place = f"{origin.topic}/{origin.partition}/{origin.offset}"
        headers = [
            *((name, value) for name, value in letter.headers.items() if not name.startswith("polar-retry")),
            ("polar-retry-of", place.encode()),
            ("polar-retry-letter", str(number).encode()),
        ]
        async with _transaction(bus, producer):
            sent = await producer.send_and_wait(
                bus.settings.full(origin.topic),
                value=found.raw,
                key=key,
                partition=origin.partition,
                timestamp_ms=bus.clock.now_ms(),
                headers=headers,
            )
            published = RecordRef(topic=origin.topic, partition=sent.partition, offset=sent.offset)
            await _resolve(bus, producer, dead, "retried", published=published, forced=force, by=by)
        return published


async def drop(bus: Bus, number: int, *, reason: str = "", by: str = "") -> None:
    """Note that a letter needs nothing further.

    Raises:
        DeadRefused: there is no such letter, or it was dealt with already.
        Fenced: another operator was at it at the same moment; nothing was written.
    """
    async with _operating(bus) as producer:
        dead = await find(bus, number)
        if dead.resolved is not None:
            raise DeadRefused(f"letter {number} was {_told(dead.resolved)} already")
        async with _transaction(bus, producer):
            await _resolve(bus, producer, dead, "dropped", reason=reason[:500], by=by)


async def _check(bus: Bus, dead: Dead, found: Content, force: bool) -> None:
    number, origin = dead.number, dead.letter.origin
    rule = RETRY.get(origin.topic)
    if rule is None:
        raise DeadRefused(f"`{origin.topic}` is no topic of this version")
    if not rule.allowed:
        raise DeadRefused(f"records of `{origin.topic}` are not retried: {rule.effect}")
    if not found.whole:
        raise DeadRefused(f"letter {number} cannot be retried: {found.problem}")
    done = dead.resolved
    if done is not None and (done.action == "retried" and not rule.again):
        raise DeadRefused(f"letter {number} was {_told(done)} already, and `{origin.topic}` allows it once")
    if done is not None and not force:
        raise DeadRefused(f"letter {number} was {_told(done)} already; --force does it all the same")
    if found.event is None and not force:
        raise DeadRefused(
            f"letter {number} would only die again: {found.error}. --force publishes it all the same, e.g. for "
            "services of a newer version than this command"
        )
    if origin.topic == "stages" and found.event is not None and not isinstance(found.event, StageChanged):
        raise DeadRefused(f"a {type(found.event).__name__} is the scheduler's own decision, made once")
    if origin.topic == "graded":
        await _check_unfinished(bus, dead, found)


async def _check_unfinished(bus: Bus, dead: Dead, found: Content) -> None:
    session = (dead.letter.key or b"").decode(errors="replace")
    if isinstance(found.event, SessionGraded):
        if found.event.revision > 0:
            return  # a revised reward has an id of its own, and no trajectory
        session = found.event.session_id
    elif found.event is None:
        raise DeadRefused("a grade that this version cannot read is not retried: whose trajectory it is is not known")
    async with _reading(
        bus, "earliest", name="results", partition=bus.partition_of("results", f"s/{session}")
    ) as reader:
        async for record in reader.to_end():
            if isinstance(record.value, SessionResult) and record.value.session_id == session:
                raise DeadRefused(f"session {session} has its result and its trajectory already")


def _told(done: DeadResolved) -> str:
    told = done.action
    if done.published is not None:
        told += f" as {done.published.topic}/{done.published.partition}/{done.published.offset}"
    return told + (f" by {done.by}" if done.by else "")


@asynccontextmanager
async def _operating(bus: Bus) -> AsyncIterator[AIOKafkaProducer]:
    """The one producer of operators: whoever had it before is fenced, and what they had begun is over."""
    producer = await bus.clients.producer(bus.settings.full(WRITER))
    try:
        yield producer
    finally:
        await stop_producer(producer)


@asynccontextmanager
async def _transaction(bus: Bus, producer: AIOKafkaProducer) -> AsyncIterator[None]:
    try:
        with translated("writing what became of a dead letter"):
            async with producer.transaction():
                yield
    except Fenced as error:
        raise Fenced("another operator is at work at the same moment: nothing was written, look again") from error


async def _resolve(bus: Bus, producer: AIOKafkaProducer, dead: Dead, action: str, **more: Any) -> None:
    origin = dead.letter.origin
    event = DeadResolved(origin=origin, letter=dead.ref, action=action, at_ms=bus.clock.now_ms(), **more)
    key = f"{origin.topic}/{origin.partition}/{origin.offset}"
    encoded = encode_out(Out("dead", key, event, source=dead.ref), Service.USER)
    await producer.send_and_wait(
        bus.settings.full("dead"),
        value=encoded.value,
        key=encoded.key,
        partition=0,
        timestamp_ms=event.at_ms,
        headers=encoded.headers,
    )


@asynccontextmanager
async def _reading(bus: Bus, start: Any, *, name: str = "dead", partition: int = 0) -> AsyncIterator[Reader]:
    reader = await bus.reader(
        [name], start="earliest" if isinstance(start, dict) else start, partitions={name: [partition]}
    )
    try:
        if isinstance(start, dict):
            # a number that was deleted long ago is no error here
            for (where, number), offset in start.items():
                reader.seek(where, number, max(offset, reader.positions()[where, number]))
        yield reader
    finally:
        await reader.close()


async def _read(bus: Bus, start: Any, *, most: int | None = None) -> dict[int, Dead]:
    """Letters by number, in log order, without their bytes."""
    found: dict[int, Dead] = {}
    open_: dict[RecordRef, list[int]] = {}
    async with _reading(bus, start) as reader:
        if most is not None:
            here = ("dead", 0)
            reader.seek(*here, max(reader.positions()[here], (await reader.ends())[here] - most))
        async for record in reader.to_end():
            match record.value:
                case DeadLetter():
                    found[record.offset] = Dead(record.offset, replace(record.value, value=b""))
                    open_.setdefault(record.value.origin, []).append(record.offset)
                case DeadResolved():
                    for number in open_.pop(record.value.origin, []):
                        found[number] = found[number]._replace(resolved=record.value)
                    late = found.get(record.value.letter.offset)
                    if late is not None:
                        found[late.number] = late._replace(resolved=record.value)
    return found
