"""The engines' metrics. Labels are what the operator wrote down, never a client's words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

ENGINE = ["engine", "model"]
"""Its URL and the sessions' model that it is for."""


class EngineMetrics:
    """One set per proxy, in the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("polar_proxy_engine_calls", "Calls that an engine has.", ENGINE, registry=registry)
        self.waiting = Gauge("polar_proxy_engine_waiting", "Calls that wait for an engine.", ENGINE, registry=registry)
        self.up = Gauge("polar_proxy_engine_up", "1: the engine gets calls.", ENGINE, registry=registry)
        self.paused = Gauge("polar_proxy_engine_paused", "1: its calls wait for a resume.", ENGINE, registry=registry)
        self.ejections = Counter(
            "polar_proxy_engine_ejections",
            "How often an engine got no more calls.",
            [*ENGINE, "reason"],
            registry=registry,
        )
        self.refused = Counter(
            "polar_proxy_engine_refused",
            "Calls that no engine took: queue_full, queue_deadline, paused, model_not_found, unfit.",
            ["reason"],
            registry=registry,
        )
