"""Submit's part in a process: see `polar.service.host`."""

from __future__ import annotations

from polar.service.host import Host

from .scheduler.settings import SchedulerSettings
from .service import SubmitService
from .settings import SubmitSettings

SETTINGS = (SubmitSettings, SchedulerSettings)


async def services(host: Host) -> list[SubmitService]:
    """The HTTP API with the view and, unless `scheduler` is off, the scheduler and callbacks."""
    return [
        SubmitService(
            host.common,
            host.kafka,
            SubmitSettings(),
            SchedulerSettings(),
            clock=host.clock,
            randomness=host.randomness,
            registry=host.registry,
        )
    ]
