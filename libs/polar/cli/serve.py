"""`polar serve`: one or more services in this process.

Services are loaded by name when they are asked for, so that a process needs only its own extra.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Annotated, Any

import typer

from polar.bus import BusSettings
from polar.service.host import Host
from polar.service.logs import configure_logs
from polar.service.run import Opened, run_services
from polar.service.settings import CommonSettings, PolarSettings, unknown_variables

from .output import BAD_INPUT, complain, fail, settings_or_fail

SERVICES = ("submit", "gateway", "proxy", "builder", "evaluator")
"""Each is `polar.<name>.main` and the extra of the same name."""


def opened(names: Sequence[str], common: CommonSettings, kafka: BusSettings) -> Callable[[], Opened]:
    """What `polar.service.run` runs: the named services, together with what they stand on."""

    @asynccontextmanager
    async def opening() -> AsyncIterator[list[Any]]:
        async with AsyncExitStack() as stack:
            host = Host(common, kafka, stack)
            yield [service for name in names for service in await _module(name).services(host)]

    return opening


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"polar.{name}.main")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("polar"):
            raise
        fail(f"service {name} needs the package {error.name}: install polar-rollout[{name}]", code=BAD_INPUT)


def settings_of(name: str) -> list[PolarSettings]:
    """A service's settings as this process would have them; exits with code 2 where one is wrong."""
    return [settings_or_fail(kind) for kind in _module(name).SETTINGS]


def serve(
    services: Annotated[
        list[str], typer.Argument(help=f"One or more of {', '.join(SERVICES)}; or all.", metavar="SERVICE...")
    ],
    check: Annotated[bool, typer.Option("--check", help="Only check settings and installation, then end.")] = False,
) -> None:
    """Run services in this process until SIGTERM or Ctrl-C.

    Settings come from POLAR_… variables and the YAML file that POLAR_CONFIG names; see them with `polar config`.
    """
    names = list(SERVICES) if "all" in services else list(dict.fromkeys(services))
    for name in names:
        if name not in SERVICES:
            fail(f"{name!r} is no service; known: {', '.join(SERVICES)}, all", code=BAD_INPUT)
    common = settings_or_fail(lambda: CommonSettings())
    kafka = settings_or_fail(lambda: BusSettings())
    kinds = [type(common), type(kafka), *(type(one) for name in names for one in settings_of(name))]
    for line in unknown_variables(os.environ, *kinds):
        complain().print(f"[yellow]warning:[/] {line}", soft_wrap=True)
    if check:
        typer.echo("settings and installation are fine")
        return
    configure_logs(common.log_level, common.log_format)
    raise typer.Exit(run_services(opened(names, common, kafka), grace_s=common.shutdown_grace_s))
