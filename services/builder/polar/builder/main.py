"""The builder's part in a process: see `polar.service.host`."""

from __future__ import annotations

from polar.schemas.topics import Service
from polar.service.host import Host

from .service import BuilderService
from .settings import BuilderSettings

SETTINGS = (BuilderSettings,)


async def services(host: Host) -> list[BuilderService]:
    """One member of the builders' group."""
    bus = await host.bus(Service.BUILDER)
    return [BuilderService(bus, BuilderSettings(), state_dir=host.common.state_dir, registry=host.registry)]
