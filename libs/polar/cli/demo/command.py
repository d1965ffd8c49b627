"""The command `polar demo`: everything from nothing to trained-on tokens, on this machine, in about a minute."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from polar.bus import BusError, BusSettings
from polar.client import NoAnswer, PolarClient, TaskRefused
from polar.schemas import TaskAccepted, Trajectory
from polar.service.logs import configure_logs

from ..output import console, fail, fail_problems
from ..report import session_advantages
from ..up import CannotUp, Running, Up, Wish, find_running
from ..up.command import run_up, shown
from ..up.discover import BOOTSTRAP_VARIABLE, DEFAULT_DIR, STATE_VARIABLE
from ..up.plan import base_url
from ..up.up import unanswered
from . import folders, telling
from .gather import drop_topics, look_closer
from .installed import installed
from .page import Findings, Group, page
from .tasks import MAX_TOKENS, SAMPLES, TASKS, agent_source, request
from .watch import Ended, Watch

PREFIX_VARIABLE = "POLAR_KAFKA_TOPIC_PREFIX"
EXAMPLES = """\b
Examples:
  polar demo
  polar demo --model-url http://127.0.0.1:8000/v1
  POLAR_KAFKA_BOOTSTRAP=127.0.0.1:9092 polar demo --model-url http://127.0.0.1:8000/v1

Each run has a new folder below --dir, and so an empty log: on the embedded model every run samples the same tokens. One
that was interrupted is gone on with. Where `polar up` runs in this folder, the demo uses it. The agent is a Python
program without a shell; where no sandbox works on this machine, it runs as a plain process, and the demo says so.
"""


@dataclass(frozen=True)
class Options:
    base: Path
    model_url: str | None
    model: str | None
    fresh: bool
    keep: bool


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Folder for the runs and demo.html.")] = folders.DEFAULT_BASE,
    model_url: Annotated[
        str | None, typer.Option(help="An engine that speaks vLLM's API, instead of the embedded model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model asked of the engine; by default its first.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="A new run, whatever was interrupted or runs here.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the topics on the Kafka of POLAR_KAFKA_BOOTSTRAP.")
    ] = False,
) -> None:
    """Show all of Polar in about a minute: an agent, a model, rewards, and the exact tokens.

    A small agent (the openai SDK, no tools) works on a few tasks, eight times each, with a 135M model on this machine's
    CPU. You see the stages live, then rewards and advantages, a trace token by token, and how it was built.
    """
    configure_logs("warning")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the demo says itself what it cannot reach
    out = console()
    options = Options(directory, model_url, model, fresh, keep)
    try:
        code = run_up(lambda: _interruptible(options, out))
    except TaskRefused as error:
        fail_problems(error.problems)
    except (NoAnswer, BusError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        out.print("interrupted; `polar demo` goes on with this run, `polar demo --fresh` begins anew")
        code = 130
    raise typer.Exit(code)


async def _interruptible(options: Options, out: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await _Demo(options, out).run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Demo:
    """One run of the command."""

    def __init__(self, options: Options, out: Console) -> None:
        self._options = options
        self._out = out
        self._began = time.monotonic()
        self._groups: dict[str, Group] = {}
        self._facts: list[str] = []

    def _say(self, line: str = "") -> None:
        self._out.print(line, soft_wrap=True)

    async def run(self) -> int:
        lines = sum(bool(line.strip()) for line in agent_source().splitlines())
        self._say(
            f"[bold]polar demo[/]: an agent of {lines} lines on {len(TASKS)} tasks, {SAMPLES} samples each; "
            "every token it was given and every token it sampled, on a log"
        )
        if importlib.util.find_spec("openai") is None:
            raise CannotUp("the demo's agent needs the package openai", hint="install polar-rollout[demo]")
        environment = await asyncio.to_thread(installed)
        self._say(f"[dim]here: {environment}[/]")
        self._facts.append(str(environment))
        async with AsyncExitStack() as stack:
            running = None if self._options.fresh else self._running()
            if running is not None:
                self._say(f"using the polar up that runs in {escape(shown(running.directory))}; seeds follow its log")
                settings = BusSettings(**running.config["kafka"])
                return await self._on(
                    settings, str(running.config["proxy"]["engine_urls"][0]), f"-{secrets.token_hex(3)}"
                )
            return await self._alone(stack)

    def _running(self) -> Running | None:
        if self._options.model_url or self._options.model or os.environ.get(BOOTSTRAP_VARIABLE):
            return None
        return find_running(os.environ.get(STATE_VARIABLE) or DEFAULT_DIR)

    async def _alone(self, stack: AsyncExitStack) -> int:
        """On an installation of its own."""
        options = self._options
        external = bool(os.environ.get(BOOTSTRAP_VARIABLE))
        prefix = os.environ.get(PREFIX_VARIABLE) or f"polar-demo-{secrets.token_hex(4)}."
        folder, note, again = await asyncio.to_thread(
            folders.choose, options.base, fresh=options.fresh, external=external, new_prefix=prefix
        )
        if options.model_url:
            for url in map(base_url, options.model_url.split(",")):
                if why := await asyncio.to_thread(unanswered, url):
                    raise CannotUp(f"no engine answers at {url} ({why})", hint="leave --model-url away for a small one")
        wish = Wish(
            directory=folder,
            model_url=options.model_url,
            model=options.model,
            settings={
                "kafka": {"partitions": 4, "task_partitions": 1, "node_partitions": 1}
                | ({"topic_prefix": note.prefix} if note.prefix else {}),
                "gateway": {"init_slots": 8, "allow_unsafe_local": await self._unsafe(folder)},
            },
            kind="demo",
        )
        what = "going on with the interrupted run" if again else "starting everything"
        self._say(f"{what} in {escape(shown(folder))}")
        up = await stack.enter_async_context(Up(wish, self._say))
        folders.write(folder, note)
        memory = up.memory_bytes()
        weight = f", {memory >> 20} MB of memory" if memory else ""
        processes = len(up.plan.programs)
        broker = "the embedded broker" if up.plan.embedded_kafka else f"Kafka at {up.plan.kafka}"
        engine = "a 135M model on the CPU" if up.plan.embedded_model else f"the engine at {up.plan.engines[0]}"
        self._say(f"[green]ready[/] after {up.ready_after_s:.1f} s: {processes} processes{weight}; {broker}, {engine}")
        self._facts += [f"ready after {up.ready_after_s:.1f} s", f"{processes} processes{weight}", broker, engine]
        settings = up.plan.bus_settings()
        code = await self._on(settings, up.plan.engines[0], "", folder)
        note.finished = True
        await asyncio.to_thread(folders.write, folder, note)
        if not up.plan.embedded_kafka and not options.keep and prefix.startswith("polar-demo-"):
            await up.stop()
            dropped = await drop_topics(settings)
            self._say(f"[dim]deleted the run's {dropped} topics from {escape(up.plan.kafka)} (--keep keeps them)[/]")
        return code

    async def _unsafe(self, folder: Path) -> bool:
        """Whether agents have to run without a sandbox here; says so."""
        from polar.runtime import create_runtime

        root = (folder / "gateway" / "probe").absolute()
        runtime = await asyncio.to_thread(create_runtime, "local", {"root": root})
        probe = await runtime.probe()
        if not probe.ok:
            why = escape(probe.reason.split(";")[0][:160])
            self._say(
                f"[yellow]no sandbox works here[/] ({why}): this demo's agent runs as a plain process, which is safe "
                "since it has no shell and no tools"
            )
        return not probe.ok

    async def _on(self, settings: BusSettings, engine: str, suffix: str, folder: Path | None = None) -> int:
        """Submit, watch, tell."""
        async with PolarClient(settings) as client:
            watch = Watch(client, self._out)
            accepted: dict[str, TaskAccepted] = {}
            for task in TASKS:  # one after the other: their places on the log make the seeds
                accepted[task.name] = await client.submit(request(task, suffix))
            titles = "; ".join(task.title for task in TASKS)
            self._say(f"{len(TASKS) * SAMPLES} sessions: {escape(titles)}; {MAX_TOKENS} tokens a call at temperature 1")
            ended = await watch.follow(accepted, self._ended)
            trajectories = [one for group in ended for one in group.trajectories]
            await self._look(client, engine, trajectories, folder)
        return 1 if all(one.outcome.failure is not None for one in trajectories) else 0

    def _ended(self, ended: Ended) -> None:
        title = next(task.title for task in TASKS if task.name == ended.name)
        group = Group(
            name=ended.name,
            title=title,
            trajectories=ended.trajectories,
            advantages=session_advantages(ended.trajectories, ended.groups),
            after_s=time.monotonic() - self._began,
        )
        self._groups[ended.name] = group
        telling.group(self._out, group)

    async def _look(
        self, client: PolarClient, engine: str, trajectories: Sequence[Trajectory], folder: Path | None
    ) -> None:
        closer = await look_closer(client, engine, self._options.model, trajectories)
        if closer.why_no_words:
            self._say(f"[yellow]no names for token ids: {escape(closer.why_no_words)}[/]")
        if closer.example is not None:
            telling.example(self._out, closer.example)
        if closer.built:
            telling.built(self._out, closer.built)
        commands = self._commands(folder, closer.example.trajectory.session_id if closer.example else None)
        found = Findings(
            facts=[*self._facts, f"{time.monotonic() - self._began:.0f} s in all"],
            groups=[self._groups[task.name] for task in TASKS if task.name in self._groups],
            example=closer.example,
            built=closer.built,
            commands=commands,
        )
        path = (self._options.base / "demo.html").absolute()
        await asyncio.to_thread(_write, path, page(found))
        self._say(f"\nthe same as a page: {escape(shown(path))}")
        self._say("\n[bold]now with your own agent[/]")
        for line in commands:
            self._out.print(f"  {line}", markup=False, soft_wrap=True, style="dim" if line.startswith("#") else "")

    def _commands(self, folder: Path | None, session: str | None) -> list[str]:
        at = f" --dir {shlex.quote(shown(folder))}" if folder is not None else ""
        found = [
            "# any program that reads OPENAI_BASE_URL and OPENAI_API_KEY; the check is its reward",
            "polar up",
            "polar run --samples 8 --check 'grep -qi tokyo answer.txt' -- python my_agent.py",
            "# your own vLLM (--logprobs-mode processed_logprobs --generation-config vllm), your own Kafka",
            "POLAR_KAFKA_BOOTSTRAP=kafka:9092 polar up --model-url http://gpu-box:8000/v1",
        ]
        if session is not None and folder is not None and not os.environ.get(BOOTSTRAP_VARIABLE):
            state = f"{STATE_VARIABLE}={shlex.quote(shown(folder))} "
            found += [
                "# this run again: its state is all in one folder",
                f"polar up{at}",
                f"{state}polar show {session}",
            ]
        elif session is not None and folder is None:
            found.append(f"polar show {session}")
        return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    draft.replace(path)
