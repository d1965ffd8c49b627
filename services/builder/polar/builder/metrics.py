"""What the builder counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from polar.schemas import BuildSummary, Trajectory


class BuilderMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.records = Counter(
            "polar_builder_records",
            "Records of polar.completions by what they meant; `late` ones are in no trajectory.",
            ["verdict"],
            registry=registry,
        )
        self._sessions = Counter("polar_builder_sessions", "Sessions built.", ["strategy", "status"], registry=registry)
        self._traces = Counter(
            "polar_builder_traces",
            "Traces by why they ended.",
            ["strategy", "harness", "break_reason"],
            registry=registry,
        )
        self._set_aside = Counter(
            "polar_builder_set_aside", "Calls in no trace, by reason.", ["reason"], registry=registry
        )
        self._tokens = Counter("polar_builder_trained_tokens", "Tokens with mask 1.", registry=registry)
        self._seconds = Histogram(
            "polar_builder_build_seconds",
            "Time to build a session.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
            registry=registry,
        )

    def built(self, trajectory: Trajectory, summary: BuildSummary, seconds: float) -> None:
        strategy = trajectory.builder.strategy
        self._sessions.labels(strategy, str(trajectory.status)).inc()
        for trace in trajectory.traces:
            self._traces.labels(strategy, trajectory.harness or "", trace.break_reason or "").inc()
        for reason, count in summary.set_aside.items():
            self._set_aside.labels(reason).inc(count)
        self._tokens.inc(summary.trained_tokens)
        self._seconds.observe(seconds)
