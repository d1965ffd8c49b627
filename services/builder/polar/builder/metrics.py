"""What the builder counts, for Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from polar.schemas import BuildSummary, Trajectory

MOST_NAMES: Final = 50
MOST_REASONS: Final = 100
"""Values of a label; later ones count as `other`. Outside strategies and tasks may name anything."""


class BuilderMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._strategies: set[str] = set()
        self._harnesses: set[str] = set()
        self._reasons: set[str] = set()
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
        self._labels = Counter(
            "polar_builder_labels", "Traces by label.", ["strategy", "harness", "label"], registry=registry
        )
        self._merges = Counter(
            "polar_builder_merges",
            "Replies that went on with a trace, by context; traces and merges together are all replies in traces.",
            ["strategy", "harness", "context"],
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
        strategy = _known(trajectory.builder.strategy, self._strategies, MOST_NAMES)
        harness = _known(trajectory.harness or "", self._harnesses, MOST_NAMES)
        self._sessions.labels(strategy, str(trajectory.status)).inc()
        for trace in trajectory.traces:
            reason = _known(trace.break_reason or "", self._reasons, MOST_REASONS)
            self._traces.labels(strategy, harness, reason).inc()
            self._labels.labels(strategy, harness, trace.label.value).inc()
        for context, count in (summary.statistics.merges if summary.statistics is not None else {}).items():
            self._merges.labels(strategy, harness, context).inc(count)
        for reason, count in summary.set_aside.items():
            self._set_aside.labels(_known(reason, self._reasons, MOST_REASONS)).inc(count)
        self._tokens.inc(summary.trained_tokens)
        self._seconds.observe(seconds)


def _known(name: str, seen: set[str], most: int) -> str:
    if name not in seen and len(seen) >= most:
        return "other"
    seen.add(name)
    return name
