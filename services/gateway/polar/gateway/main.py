"""The gateway as part of a process: `polar serve gateway`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from polar.service.host import Host
from polar.service.settings import PolarSettings

from .service import GatewayService
from .settings import GatewaySettings

SETTINGS: tuple[type[PolarSettings], ...] = (GatewaySettings,)


async def services(host: Host) -> list[GatewayService]:
    """The services of this process: one node, or the half of it that POLAR_GATEWAY_STAGE names."""
    return [
        GatewayService(
            GatewaySettings(), host.kafka, host.common, clock=host.clock, randomness=host.randomness, registry=REGISTRY
        )
    ]
