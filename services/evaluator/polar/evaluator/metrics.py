"""What graders and finishers count, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from polar.schemas import Failure, Grade

_SECONDS = (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class GraderMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.grades = Counter("polar_grader_grades", "Grades by how they ended.", ["result"], registry=registry)
        self._seconds = Histogram(
            "polar_grader_seconds", "Time of a grade.", ["evaluator"], buckets=_SECONDS, registry=registry
        )

    def graded(self, evaluator: str, found: Grade | Failure, seconds: float) -> None:
        self.grades.labels("failed" if isinstance(found, Failure) else "graded").inc()
        self._seconds.labels(evaluator).observe(seconds)


class FinisherMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.finished = Counter(
            "polar_finisher_sessions", "Sessions published, by status.", ["status"], registry=registry
        )
        self.revised = Counter("polar_finisher_revisions", "Revised rewards published.", registry=registry)
