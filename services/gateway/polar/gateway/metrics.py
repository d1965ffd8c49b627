"""The gateway's numbers for Prometheus, in a registry that is passed in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = Gauge("polar_gateway_attempts", "Attempts on the node's books.", ["stage"], registry=registry)
        self.ended = Counter(
            "polar_gateway_ended", "Attempts that have ended here.", ["reason", "failure"], registry=registry
        )
        self.reports = Counter("polar_gateway_reports", "Reports acknowledged by the broker.", registry=registry)
        self.ignored = Counter("polar_gateway_ignored", "Assignments that were not for this boot.", registry=registry)
        self.reaped = Counter("polar_gateway_reaped", "Boxes destroyed that nobody owned.", registry=registry)
