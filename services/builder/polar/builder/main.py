"""The builder as part of a process: `polar serve builder`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from polar.schemas.topics import Service
from polar.service.host import Host
from polar.service.settings import PolarSettings

from .service import BuilderService
from .settings import BuilderSettings

SETTINGS: tuple[type[PolarSettings], ...] = (BuilderSettings,)


async def services(host: Host) -> list[BuilderService]:
    """The services of this process: one builder.

    Raises:
        BrokerUnavailable, TopicsWrong: see `polar.bus`.
    """
    bus = await host.bus(Service.BUILDER)
    return [BuilderService(bus, BuilderSettings(), state_dir=host.common.state_dir, registry=REGISTRY)]
