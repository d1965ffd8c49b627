"""Trajectories again, from `polar.completions`: what `polar rebuild` runs.

Promises: a session is built by the service's own `SessionProcessor` from its first record to its closing one, so that
the same builder, version and configuration give the bytes that stand in `polar.built`; memory holds the sessions that
are open at one place of one partition, and of those no more than `memory_bytes` of calls; what cannot be built is
counted and named, never left out in silence. Knows nothing of rewards or of where the trajectories go.

Two passes. The first notes where sessions open and close: from the first record of the time that is asked for, then
backwards until the start of every session that closed in it is found. The second reads each partition from the first
start that is needed, and skips stretches in which no selected session is open.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusError, Out, Record, RecordTooLarge
from polar.bus.transactional import prepare
from polar.client.ranges import Bounds, Stretch, bounds
from polar.schemas import BuilderSpec, RecordRef, SessionOpened, Trajectory
from polar.schemas.topics import Service

from .bodies import BodyStore
from .metrics import BuilderMetrics
from .processor import SessionProcessor
from .rebuild_index import Named, SessionIndex, State
from .rebuild_select import MARGIN_MS, Selection, look_back, sighting
from .texts import Tokenizers

TOPIC: Final = "completions"
SKIP_RECORDS: Final = 2_000
"""Shorter stretches without a selected session are read through: a seek throws away what the consumer holds."""
MOST_NAMES: Final = 100

Watch = Callable[[str, int, int], None]
"""What is being done, records done, records in all."""


class Rebuilt(NamedTuple):
    """One session built again."""

    trajectory: Trajectory
    """Without reward."""
    value: bytes
    """As a record's value: what the builder writes to `polar.built`."""
    closed_ms: int
    """Time stamp of the closing record, ms since the epoch."""


@dataclass(frozen=True, slots=True)
class Left:
    """What was selected and is not built, with up to `MOST_NAMES` names each."""

    lost: Named
    """Their start is no longer on the log."""
    unfinished: Named
    """Not closed, or a call is still open: there is no closing record yet."""
    failed: dict[str, str] = field(default_factory=dict)
    """Not built for another reason."""
    unknown: tuple[str, ...] = ()
    """What was named and nothing is known of."""
    strangers: int = 0
    """Sessions closed in the time asked for of which not even the task is known any more."""
    unreadable: int = 0
    """Records that this version cannot decode; the builder leaves them out too."""


class Rebuilder:
    """Finds and builds sessions. An async context manager; first `find`, then `trajectories`, then `left`.

    Args:
        bus: opened; only read from.
        selection: which sessions.
        spec: the builder; None: each session's own.
        allowed: strategies from outside that may be loaded.
        tokenizers: those that `spec` may name.
        folder: for scratch files.
        memory_bytes: calls held in memory; more goes to a scratch file.
        watch: told the progress.
    """

    def __init__(
        self,
        bus: Bus,
        selection: Selection,
        *,
        spec: BuilderSpec | None = None,
        allowed: Collection[str] = (),
        tokenizers: Tokenizers | None = None,
        folder: Path,
        memory_bytes: int,
        watch: Watch = lambda *_: None,
    ) -> None:
        self._bus = bus
        self._selection = selection
        self._spec = spec
        self._allowed = allowed
        self._tokenizers = tokenizers
        self._watch = watch
        self._store = BodyStore(folder, memory_bytes)
        self._metrics = BuilderMetrics(CollectorRegistry())
        self._bounds: dict[int, Bounds] = {}
        self._unreadable = 0
        self._read = 0
        self.index = SessionIndex(folder)

    async def __aenter__(self) -> Self:
        await self.index.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.index.__aexit__(kind, error, trace)
        finally:
            await self._store.close()

    async def find(self) -> int:
        """The first pass; returns how many sessions are meant.

        Raises:
            BusError: the log cannot be read, or the scratch file not written.
        """
        named = self._selection.sessions
        partitions = {self._bus.partition_of(TOPIC, one) for one in named} if named else None
        chosen = None if partitions is None else sorted(partitions)
        self._bounds = await bounds(self._bus, TOPIC, partitions=chosen)
        starts = {one: where.start for one, where in self._bounds.items()}
        since_ms = self._selection.since_ms
        if since_ms is not None:
            later = await bounds(self._bus, TOPIC, since_ms=since_ms - MARGIN_MS, partitions=chosen)
            starts = {one: min(max(starts[one], where.start), self._bounds[one].end) for one, where in later.items()}
        total = sum(where.end - starts[one] for one, where in self._bounds.items())
        self._read = 0
        for partition, (log_start, end) in self._bounds.items():
            await self._note(partition, starts[partition], end, total, stop=True)
            for begin, stop in look_back(starts[partition], log_start):
                if not await self.index.homeless(self._selection, partition):
                    break
                total += stop - begin
                await self._note(partition, begin, stop, total, stop=False)
        return await self.index.choose(self._selection)

    async def trajectories(self) -> AsyncGenerator[Rebuilt]:
        """The second pass: trajectories in order of partition and closing record, so in the same order each time.

        Raises:
            BusError: as `find`.
        """
        self._read = 0
        for partition, count in sorted((await self.index.partitions()).items()):
            async with aclosing(self._partition(partition, count)) as found:
                async for one in found:
                    yield one

    async def left(self) -> Left:
        """What is missing, once `trajectories` has ended."""
        starts = {one: where.start for one, where in self._bounds.items()}
        return Left(
            lost=await self.index.lost(starts, MOST_NAMES),
            unfinished=await self.index.unfinished(starts, MOST_NAMES),
            failed=await self.index.failed(MOST_NAMES),
            unknown=tuple(await self.index.unknown(self._selection)),
            strangers=await self.index.strangers(self._selection),
            unreadable=self._unreadable,
        )

    async def _note(self, partition: int, start: int, end: int, total: int, *, stop: bool) -> None:
        """Takes what is seen from `start` to `end` into the index; `stop`: or to where the time asked for is over."""
        stretch = Stretch(self._bus, TOPIC, partition, start, end)
        before = start
        async with aclosing(stretch.batches()) as batches:
            async for batch in batches:
                spans, over = [], False
                for record in batch:
                    if record.value is None:
                        continue
                    span = sighting(record.value, partition, record.offset, self._selection)
                    if span is not None:
                        spans.append(span)
                    over = over or (stop and self._selection.over(record.value))
                await self.index.see(spans)
                self._read += stretch.position - before
                before = stretch.position
                self._watch("looking for sessions", self._read, total)
                if over:
                    break
        self._forgotten(partition, stretch)
        self._read += end - before

    def _forgotten(self, partition: int, stretch: Stretch) -> None:
        """Retention went on while we read: what began before is lost."""
        if stretch.gone:
            where = self._bounds[partition]
            self._bounds[partition] = Bounds(max(where.start, stretch.gone), where.end)

    async def _partition(self, partition: int, count: int) -> AsyncGenerator[Rebuilt]:
        """Builds the `count` selected sessions of a partition."""
        first = await self.index.next_opening(partition, 0)
        assert first is not None, "a partition is listed where a session begins in it"
        end = self._bounds[partition].end
        stretch = Stretch(self._bus, TOPIC, partition, first, end)
        active: dict[str, _Session] = {}
        try:
            async with aclosing(stretch.batches()) as batches:
                async for batch in batches:
                    opened = {one.value.session_id for one in batch if isinstance(one.value, SessionOpened)}
                    wanted = await self.index.chosen(opened, State.CHOSEN)
                    built: list[str] = []
                    for record in batch:
                        session = record.key or ""
                        if record.value is None:
                            self._unreadable += session in active
                            continue
                        if session not in active:
                            if session not in wanted or not isinstance(record.value, SessionOpened):
                                continue
                            wanted.discard(session)
                            active[session] = self._session()
                        try:
                            found = await active[session].take(record, self._spec)
                        except Exception as error:  # one session's records must not end the others' rebuild
                            if isinstance(error, BusError) and not isinstance(error, RecordTooLarge):
                                raise
                            del active[session]
                            await self.index.mark([session], State.FAILED, f"{type(error).__name__}: {error}")
                            count -= 1
                            continue
                        if found is not None:
                            del active[session]
                            built.append(session)
                            yield found
                    await self.index.mark(built, State.BUILT)
                    count -= len(built)
                    if not count:
                        break
                    self._watch("building", stretch.position - first, end - first)
                    if not active:
                        following = await self.index.next_opening(partition, stretch.position)
                        if following is None:
                            break
                        if following - stretch.position > SKIP_RECORDS:
                            stretch.skip_to(following)
        finally:
            self._forgotten(partition, stretch)

    def _session(self) -> _Session:
        processor = SessionProcessor(
            self._store.scope(), self._metrics, self._bus.clock, self._allowed, self._tokenizers
        )
        return _Session(self._bus, processor)


class _Session:
    """One session, in a processor of its own: forgotten with it, whatever its records do."""

    def __init__(self, bus: Bus, processor: SessionProcessor) -> None:
        self._bus = bus
        self._processor = processor
        self._found: tuple[Trajectory, bytes] | None = None

    async def take(self, record: Record, spec: BuilderSpec | None) -> Rebuilt | None:
        """The next record; the trajectory if it is the closing one."""
        if spec is not None and isinstance(record.value, SessionOpened):
            record = replace(record, value=replace(record.value, builder=spec))
        await self._processor.process(record, self._send)
        return None if self._found is None else Rebuilt(*self._found, record.timestamp_ms)

    async def _send(self, *outs: Out) -> list[RecordRef]:
        """Takes what the builder would write, with the builder's checks: what is too large raises as it does there."""
        encoded = prepare(outs, Service.BUILDER, self._bus.settings)
        for out, bytes_ in zip(outs, encoded, strict=True):
            if isinstance(out.value, Trajectory):
                assert bytes_.value is not None
                self._found = out.value, bytes_.value
        return [RecordRef(topic=out.topic, partition=0, offset=0) for out in outs]
