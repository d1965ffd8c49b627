"""A log in memory and a view's file that reads it, for tests of what rows come of which records."""

from pathlib import Path

from polar.schemas import Event, RecordRef, Stage
from polar.submit import lookups
from polar.submit.entries import Change, TaskEntry, ViewLimits
from polar.submit.viewfile import ViewFile
from tests.submit.records import NAMES, accepted, message, session_result, task_result


class Log:
    """Partitions that only grow, and a view that reads them."""

    def __init__(self, path: Path, limits: ViewLimits | None = None) -> None:
        self.file = ViewFile(path, limits or ViewLimits(), "test")
        self.ends: dict[tuple[str, int], int] = {}

    def put(
        self, event: Event | None, topic: str = "stages", partition: int = 0, key: str | None = "k"
    ) -> list[Change]:
        place = (topic, partition)
        offset = self.ends.get(place, 0)
        self.ends[place] = offset + 1
        return self.at(event, RecordRef(topic=topic, partition=partition, offset=offset), key)

    def at(self, event: Event | None, place: RecordRef, key: str | None = "k") -> list[Change]:
        applied = self.file.apply([message(event, place, key)], NAMES)
        assert applied.poison == []
        return list(applied.changes)

    def result(self, event: Event, partition: int = 0) -> list[Change]:
        return self.put(event, "results", partition)

    def whole_task(self, task_id: str, count: int = 1, at_ms: int = 4_000) -> None:
        self.put(accepted(task_id, count))
        for number in range(count):
            self.result(session_result(f"{task_id}-{number}"))
        self.result(task_result(task_id, count, at_ms=at_ms))

    def task(self, task_id: str) -> TaskEntry:
        found = lookups.task(self.file._db, task_id)
        assert found is not None
        return found

    def known(self) -> set[str]:
        return set(lookups.everything(self.file._db))

    def in_flight(self) -> dict[Stage, int]:
        return {stage: count for stage, count in self.file.flight.items() if count}
