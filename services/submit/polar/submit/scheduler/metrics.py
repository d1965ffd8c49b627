"""What the scheduler counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.leading = Gauge("polar_scheduler_leading", "1 while this process leads.", registry=registry)
        self.terms = Counter("polar_scheduler_terms", "Leaderships that this process began.", registry=registry)
        self.ended = Counter(
            "polar_scheduler_terms_ended",
            "Leaderships that ended: `fenced`, `log`, `poison`, `too_large`, or `stood_still` (the watchdog).",
            ["reason"],
            registry=registry,
        )
