"""`polar serve`: one or more services in this process.

Services are loaded by name when they are asked for, so that a process needs only its own extra.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from polar.bus import BusSettings
from polar.service.logs import configure_logs
from polar.service.settings import CommonSettings, PolarSettings, unknown_variables

from .output import BAD_INPUT, fail, settings_or_fail, warn

if TYPE_CHECKING:
    from polar.service.run import Opened

SERVICES = ("submit", "gateway", "proxy", "builder", "evaluator")
"""Each is `polar.<name>.main` and the extra of the same name."""
EXAMPLES = """\b
Examples:
  POLAR_PROXY_ENGINE_URLS=http://127.0.0.1:8000/v1 polar serve all
  POLAR_GATEWAY_RUN_SLOTS=32 polar serve gateway
  POLAR_METRICS_PORT=9100 polar serve builder evaluator
  polar serve all --check

With POLAR_METRICS_PORT set the process answers /health, /ready and /metrics (Prometheus) on that port. Exit codes:
0 stopped by a signal, 1 failed, 2 settings or installation are wrong.
"""


class NotInstalled(Exception):
    """A service's package lacks another one; the message says what to install."""


def opened(names: Sequence[str], common: CommonSettings, kafka: BusSettings) -> Callable[[], Opened]:
    """What `polar.service.run` runs: the named services, together with what they stand on."""

    @asynccontextmanager
    async def opening() -> AsyncIterator[list[Any]]:
        from prometheus_client import REGISTRY

        from polar.service.admin import Admin
        from polar.service.host import Host

        async with AsyncExitStack() as stack:
            # the process's own registry: it has Python's and the process's metrics besides
            host = Host(common, kafka, stack, registry=REGISTRY)
            services = [service for name in names for service in await load(name).services(host)]
            if common.metrics_port is not None:
                served = tuple(services)
                services.append(
                    Admin(
                        common.metrics_port,
                        host=common.metrics_host,
                        ready=lambda: all_ready(served),
                        registry=host.registry,
                    )
                )
            yield services

    return opening


def all_ready(services: Iterable[Any]) -> bool:
    """Whether each service that tells whether it is ready (`ready`: a property, or an event) is."""
    found = (getattr(service, "ready", True) for service in services)
    return all(one.is_set() if hasattr(one, "is_set") else bool(one) for one in found)


def load(name: str) -> ModuleType:
    """The module `main` of a service.

    Raises:
        NotInstalled: a package that it needs is missing.
    """
    try:
        return importlib.import_module(f"polar.{name}.main")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "polar" and error.name != f"polar.{name}":
            raise
        missing = (error.name or "?").split(".")[0] if error.name != f"polar.{name}" else error.name
        raise NotInstalled(f"service {name} needs the package {missing}: install polar-rollout[{name}]") from None


def settings_of(name: str) -> list[PolarSettings]:
    """A service's settings as this process would have them; ends with exit code 2 where one is wrong.

    Raises:
        NotInstalled: a package of the service is missing.
    """
    return [settings_or_fail(kind) for kind in load(name).SETTINGS]


def serve(
    services: Annotated[
        list[str], typer.Argument(help=f"One or more of {', '.join(SERVICES)}; or all.", metavar="SERVICE")
    ],
    check: Annotated[bool, typer.Option("--check", help="Only check settings and installation, then end.")] = False,
) -> None:
    """Run services in this process until SIGTERM or Ctrl-C.

    The first signal lets them finish what they have, within POLAR_SHUTDOWN_GRACE_S; the second stops at once.
    Settings come from POLAR_… variables and the YAML file that POLAR_CONFIG names: see `polar config --explain`.
    """
    for name in services:
        if name not in (*SERVICES, "all"):
            fail(f"{name!r} is no service; known: {', '.join(SERVICES)}, all", code=BAD_INPUT)
    names = list(SERVICES) if "all" in services else list(dict.fromkeys(services))
    common, kafka = settings_or_fail(CommonSettings), settings_or_fail(BusSettings)
    try:
        kinds = [type(common), type(kafka), *(type(one) for name in names for one in settings_of(name))]
    except NotInstalled as error:
        fail(str(error), code=BAD_INPUT)
    unknown = unknown_variables(os.environ, *kinds)
    if check:
        for line in unknown:
            warn(line)
        typer.echo("settings and installation are fine")
        return
    from polar.service.run import run_services

    configure_logs(common.log_level, common.log_format)
    for line in unknown:
        structlog.get_logger(__name__).warning(line)
    raise typer.Exit(run_services(opened(names, common, kafka), grace_s=common.shutdown_grace_s))
