"""The evaluator as part of a process: `polar serve evaluator`."""

from __future__ import annotations

from prometheus_client import REGISTRY

from polar.schemas.topics import Service
from polar.service.host import Host
from polar.service.settings import PolarSettings

from .finisher import FinisherService
from .node import GraderService
from .settings import EvaluatorSettings

SETTINGS: tuple[type[PolarSettings], ...] = (EvaluatorSettings,)


async def services(host: Host) -> list[GraderService | FinisherService]:
    """A grader, a finisher, or both, as the setting `stage` says.

    Raises:
        BrokerUnavailable, TopicsWrong: see `polar.bus`.
    """
    settings = EvaluatorSettings()
    found: list[GraderService | FinisherService] = []
    if settings.stage in ("all", "grade"):
        bus = await host.bus(Service.GRADER)
        found.append(GraderService(bus, settings, randomness=host.randomness, registry=REGISTRY))
    if settings.stage in ("all", "finish"):
        bus = await host.bus(Service.FINISHER)
        found.append(FinisherService(bus, settings, registry=REGISTRY))
    return found
