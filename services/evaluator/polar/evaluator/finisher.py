"""The finisher on the log: `graded` in; trajectory, result and FINISHED out, in one transaction.

Promises: each `SessionGraded` of revision 0 becomes exactly one trajectory, read committed, whatever is killed; one
that cannot be published, or whose built record is gone, becomes one with an error and without traces. It has no memory.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from polar.bus import Bus, Out, PartitionWorker, Progress, Record, RecordGone, RecordTooLarge, Send
from polar.schemas import Failure, FailureKind, RecordRef, SessionGraded, Stage, Trajectory
from polar.service.logs import get_logger

from .finishing import bare, finished, lost, result_of, revision_of, stage_of, without_traces
from .metrics import FinisherMetrics
from .settings import EvaluatorSettings

_log = get_logger(__name__)


class FinishProcessor:
    """A `polar.bus.Processor` without state."""

    def __init__(self, bus: Bus, metrics: FinisherMetrics) -> None:
        self._bus = bus
        self._metrics = metrics

    def replay(self, record: Record) -> None:
        """Nothing is kept."""

    def replay_from(self, next_offset: int) -> int:
        return next_offset

    async def process(self, record: Record, send: Send) -> None:
        graded = record.value
        assert isinstance(graded, SessionGraded)
        now = self._bus.clock.now_ms()
        if graded.revision > 0:
            await send(Out("rewards", graded.group_id, revision_of(graded, now), source=record.ref))
            self._metrics.revised.inc()
            return
        built = await self._built(graded)
        trajectory, published = await self._publish(finished(built, graded), record, send)
        await send(
            Out(
                "results",
                f"s/{graded.session_id}",
                result_of(trajectory, graded, published, now),
                source=record.ref,
            ),
            Out("stages", graded.session_id, stage_of(trajectory, graded, published, now), source=record.ref),
        )
        self._metrics.finished.labels(str(trajectory.status)).inc()

    async def _built(self, graded: SessionGraded) -> Trajectory:
        try:
            found = (await self._bus.lookup(graded.built)).value
        except RecordGone as error:
            _log.error("built record is gone", session=graded.session_id, reason=str(error))
            return lost(graded, f"the built trajectory is no longer on the log: {error}")
        if not isinstance(found, Trajectory) or found.session_id != graded.session_id:
            return lost(graded, "the grade does not refer to a built trajectory of its session")
        return found

    async def _publish(self, trajectory: Trajectory, record: Record, send: Send) -> tuple[Trajectory, RecordRef]:
        try:
            return trajectory, await self._send(trajectory, record, send)
        except RecordTooLarge as error:
            _log.warning("trajectory too large", session=trajectory.session_id, bytes=error.size)
            smaller = without_traces(trajectory, _too_large(error))
        try:
            return smaller, await self._send(smaller, record, send)
        except RecordTooLarge:
            smallest = bare(smaller)
            return smallest, await self._send(smallest, record, send)

    async def _send(self, trajectory: Trajectory, record: Record, send: Send) -> RecordRef:
        (ref,) = await send(Out("trajectories", trajectory.group_id, trajectory, source=record.ref))
        return ref


def _too_large(error: RecordTooLarge) -> Failure:
    return Failure(
        kind=FailureKind.INFRA,
        message=f"the trajectory has {error.size} bytes, over the limit of {error.limit} for a record; raise "
        "POLAR_KAFKA_MAX_RECORD_BYTES",
        stage=str(Stage.FINISHED),
    )


class FinisherService:
    """One finisher process; as many as one likes share the partitions of `graded`."""

    def __init__(self, bus: Bus, settings: EvaluatorSettings, *, registry: CollectorRegistry | None = None) -> None:
        """`bus`: opened, of service `finisher`."""
        self._bus = bus
        self._settings = settings
        self._registry = registry or CollectorRegistry()
        self._metrics = FinisherMetrics(self._registry)
        self._worker: PartitionWorker | None = None

    @property
    def ready(self) -> bool:
        """Whether it is a member of its group."""
        return self._worker is not None and self._worker.joined

    def progress(self) -> dict[int, Progress]:
        """Where it is, by partition it has."""
        return self._worker.progress() if self._worker is not None else {}

    async def run(self) -> None:
        """Finishes until cancelled.

        Raises:
            TopicsWrong: the topics are not as the topic table wants them.
            CursorLost: grades were lost before they were processed; see the setting `accept_loss`.
            Stuck: grades wait and nothing helps; the process must end.
        """
        await self._bus.prepare()
        self._worker = PartitionWorker(
            self._bus,
            "graded",
            "finisher",
            lambda _: FinishProcessor(self._bus, self._metrics),
            max_batch=self._settings.max_batch,
            accept_loss=self._settings.accept_loss,
            registry=self._registry,
        )
        try:
            await self._worker.run()
        finally:
            self._worker = None
