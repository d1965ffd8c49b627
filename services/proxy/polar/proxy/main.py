"""The proxy as part of a process: `polar serve proxy`."""

from __future__ import annotations

from polar.schemas.topics import Service
from polar.service.host import Host
from polar.service.settings import PolarSettings

from .service import ProxyService
from .settings import ProxySettings

SETTINGS: tuple[type[PolarSettings], ...] = (ProxySettings,)


async def services(host: Host) -> list[ProxyService]:
    """The services of this process: one proxy.

    Raises:
        BrokerUnavailable, TopicsWrong: see `polar.bus`.
    """
    bus = await host.bus(Service.PROXY)
    secret = await host.secret()
    settings = ProxySettings()
    return [ProxyService(settings, bus, secret, clock=host.clock, randomness=host.randomness, registry=host.registry)]
