"""`polar`: the command line. `polar --help` and `polar COMMAND --help` are enough to use it."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Annotated

import typer

from . import audit, dead, operate, read, rebuild, replay, run, serve, status, tasks
from .demo import command as demo_command
from .up import command as up_command
from .up import use_running

app = typer.Typer(
    name="polar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polar-rollout {metadata.version('polar-rollout')}")
        raise typer.Exit


@app.callback()
def polar(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Token-faithful rollouts of any agent harness for reinforcement learning, on Kafka.

    Where Kafka is, and every other setting, comes from POLAR_… variables or the YAML file that POLAR_CONFIG names;
    `polar config --explain` lists them. Where `polar up` runs in this folder, its .polar/polar.yaml is that file.
    """
    if context.invoked_subcommand not in ("up", "demo"):
        use_running(os.environ)


app.command(epilog=demo_command.EXAMPLES)(demo_command.demo)
app.command(epilog=up_command.EXAMPLES)(up_command.up)
app.command(no_args_is_help=True, epilog=serve.EXAMPLES)(serve.serve)
# options end at the agent's command, so that its own options are its own
app.command(no_args_is_help=True, epilog=run.EXAMPLES, context_settings={"allow_interspersed_args": False})(run.run)
app.command(no_args_is_help=True, epilog=tasks.SUBMIT_EXAMPLES)(tasks.submit)
app.command(epilog=status.EXAMPLES)(status.status)
app.command(no_args_is_help=True)(tasks.cancel)
app.command(epilog=read.TRAJECTORIES_EXAMPLES)(read.trajectories)
app.command(no_args_is_help=True, epilog=read.SHOW_EXAMPLES)(read.show)
app.command(no_args_is_help=True, epilog=rebuild.EXAMPLES)(rebuild.rebuild)
app.command(no_args_is_help=True, epilog=replay.EXAMPLES)(replay.replay)
app.command(epilog=audit.EXAMPLES)(audit.audit)
app.add_typer(dead.app)
app.command()(operate.topics)
app.command(epilog=operate.CONFIG_EXAMPLES)(operate.config)


def main() -> None:
    """The console script's entry."""
    app()


if __name__ == "__main__":
    main()
