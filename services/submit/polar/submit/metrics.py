"""Submit's Prometheus metrics, in the registry passed in; the view's gauges are read when they are asked for."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.schemas import Stage

from .view import View


class SubmitMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "polar_submit_requests", "HTTP requests, by route and status.", ["route", "status"], registry=registry
        )
        self.accept_seconds = Histogram(
            "polar_submit_accept_seconds",
            "From publishing a task to the scheduler's answer.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.view_records = Counter(
            "polar_submit_view_records", "Records the view has read, by topic.", ["topic"], registry=registry
        )
        self.view_poison = Counter(
            "polar_submit_view_poison", "Records the view passed over, by topic.", ["topic"], registry=registry
        )
        self.view_restarts = Counter(
            "polar_submit_view_restarts",
            "Readers of the view replaced because they failed or stalled.",
            registry=registry,
        )
        self.view_rebuilds = Counter(
            "polar_submit_view_rebuilds", "Times the view's file was thrown away.", registry=registry
        )
        self.watchers_cut = Counter(
            "polar_submit_watchers_cut", "Watchers of /events cut off because they read too slowly.", registry=registry
        )
        self.callbacks = Counter(
            "polar_submit_callbacks",
            "Callbacks, by how they ended: delivered, refused, given_up, unknown.",
            ["outcome"],
            registry=registry,
        )
        self.callback_tries = Counter("polar_submit_callback_tries", "Requests made for callbacks.", registry=registry)

    def watch(self, view: View) -> None:
        """Show what `view` holds."""
        tasks = Gauge("polar_submit_view_tasks", "Tasks in the view.", registry=self.registry)
        tasks.set_function(lambda: view.counts.tasks)
        sessions = Gauge("polar_submit_view_sessions", "Sessions in the view.", registry=self.registry)
        sessions.set_function(lambda: view.counts.sessions)
        size = Gauge("polar_submit_view_bytes", "Used in the view's file.", registry=self.registry)
        size.set_function(lambda: view.counts.bytes)
        dropped = Gauge(
            "polar_submit_view_forgotten_tasks", "Tasks forgotten because of limits.", registry=self.registry
        )
        dropped.set_function(lambda: view.counts.dropped)
        nodes = Gauge("polar_submit_nodes_alive", "Nodes whose beats are recent.", registry=self.registry)
        nodes.set_function(lambda: sum(view.alive(one) for one in view.nodes.values()))
        flight = Gauge("polar_submit_sessions_in_flight", "Unfinished sessions.", ["stage"], registry=self.registry)
        for stage in Stage:
            if stage is not Stage.FINISHED:
                flight.labels(stage.value).set_function(partial(_in_flight, view, stage))


def _in_flight(view: View, stage: Stage) -> float:
    return view.in_flight().get(stage, 0)
