"""The command `polar up`."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from polar.service.settings import ConfigWrong

from ..output import BAD_INPUT, console, fail
from .discover import DEFAULT_DIR, STATE_VARIABLE
from .errors import CannotUp
from .plan import SERVICES, Wish
from .up import Up

EXAMPLES = """\b
Examples:
  polar up
  POLAR_KAFKA_BOOTSTRAP=127.0.0.1:9092 polar up
  polar up --model-url http://127.0.0.1:8000/v1 --model my-model
  POLAR_GATEWAY_RUN_SLOTS=32 POLAR_SUBMIT_PORT=9000 polar up --dir /data/polar

While it runs, every other command in the same folder finds it with nothing exported: `polar up` writes its addresses
to DIR/polar.yaml, and commands use .polar/polar.yaml as if POLAR_CONFIG named it (or that of POLAR_STATE_DIR, for
another --dir). Stop it with Ctrl-C; once more ends everything at once. To forget everything, delete DIR.
"""


def up(
    directory: Annotated[
        Path, typer.Option("--dir", envvar=STATE_VARIABLE, help="Folder that holds all state; made where missing.")
    ] = Path(DEFAULT_DIR),
    model_url: Annotated[
        str | None,
        typer.Option(help="An engine that speaks vLLM's API, such as http://127.0.0.1:8000/v1; several with commas."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model asked of the engine; by default its first.")] = None,
    without: Annotated[list[str], typer.Option(help=f"A service not to run: {', '.join(SERVICES)}; repeatable.")] = [],  # noqa: B006
    kafka_port: Annotated[int | None, typer.Option(help="Port of the embedded broker.", min=1, max=65535)] = None,
    model_port: Annotated[int | None, typer.Option(help="Port of the embedded model.", min=1, max=65535)] = None,
) -> None:
    """Run everything on this machine: broker, model and services, until Ctrl-C.

    The broker is the embedded one unless POLAR_KAFKA_BOOTSTRAP names Apache Kafka; the model is a small one on
    the CPU unless --model-url (or POLAR_PROXY_ENGINE_URLS) names vLLM. What ends is started again.
    """
    wish = Wish(
        directory=directory,
        model_url=model_url,
        model=model,
        without=frozenset(without),
        kafka_port=kafka_port,
        model_port=model_port,
    )
    out = console()
    raise typer.Exit(run_up(lambda: _run(wish, out)))


def run_up(main: Callable[[], object]) -> int:
    """Run what holds an `Up`; what was to be expected ends in one line. Returns the exit code."""
    try:
        return asyncio.run(main())  # type: ignore[arg-type]
    except CannotUp as error:
        fail(str(error), hint=error.hint, code=BAD_INPUT if error.bad_input else 1)
    except ConfigWrong as error:
        fail(str(error), code=BAD_INPUT)
    except ValidationError as error:
        first = error.errors()[0]
        fail(f"{error.title}.{'.'.join(map(str, first['loc']))}: {first['msg']}", code=BAD_INPUT)


class Stopping:
    """SIGINT, SIGTERM, SIGHUP (no terminal any more): the first asks to stop, the second cancels what still goes on."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._got)

    def _got(self) -> None:
        if self.asked.is_set() and self._task is not None:
            self._task.cancel()
        self.asked.set()


async def _run(wish: Wish, out: Console) -> int:
    def tell(line: str) -> None:
        out.print(line, soft_wrap=True)

    stopping = Stopping()
    asked = asyncio.create_task(stopping.asked.wait())
    one = Up(wish, tell)
    tell(f"polar up in {escape(shown(wish.directory))}")
    entering = asyncio.create_task(one.__aenter__())
    await asyncio.wait([entering, asked], return_when=asyncio.FIRST_COMPLETED)
    if not entering.done():
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        tell("stopped before it was ready")
        return 130
    await entering
    greet(one, tell)
    failing = asyncio.create_task(one.supervisor.failed())
    try:
        await asyncio.wait([asked, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        tell("stopping; Ctrl-C once more ends everything at once")
        killed = await one.stop()
    except asyncio.CancelledError:
        await one.kill()
        tell("ended; the next `polar up` goes on where this one was")
        return 130
    finally:
        failing.cancel()
        asked.cancel()
        await one.stop()
    for name in killed:
        tell(f"[yellow]{name} did not stop in time and was killed[/]")
    tell(f"stopped. State is kept in {escape(shown(wish.directory))}")
    return 0


def greet(one: Up, tell: Callable[[str], None]) -> None:
    """Where everything is, and what to type next."""
    plan = one.plan
    memory = one.memory_bytes()
    weight = f", {memory >> 20} MB in {len(plan.programs) + 1} processes" if memory else ""
    tell(f"[bold green]ready[/] after {one.ready_after_s:.1f} s{weight}")
    if plan.api:
        tell(f"  HTTP API  {plan.api}")
    tell(f"  Kafka     {plan.kafka}" + ("  (embedded broker)" if plan.embedded_kafka else ""))
    engine = f"{plan.model}, embedded, on the CPU" if plan.embedded_model else plan.model or "its first model"
    tell(f"  model     {', '.join(plan.engines)}  ({engine})")
    directory = escape(shown(one.wish.directory))
    tell(f"  state     {directory}  (all of it: to forget everything, stop and delete the folder; logs in its logs/)")
    other = one.wish.directory.absolute() != Path(DEFAULT_DIR).absolute()
    prefix = f"POLAR_STATE_DIR={shlex.quote(shown(one.wish.directory))} " if other else ""
    tell("next, in another terminal" + ("" if other else ", in this folder") + ":")
    tell(escape(f"  {prefix}polar run --samples 8 --check 'grep -qi tokyo answer.txt' -- python my_agent.py"))
    tell(escape(f"  {prefix}polar status"))


def shown(path: Path) -> str:
    """A path as a person would type it here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
