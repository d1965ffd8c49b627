"""`polar`: the command line. `polar --help` and `polar COMMAND --help` are enough to use it."""

from __future__ import annotations

import typer

from . import commands, operate, serve

app = typer.Typer(
    name="polar",
    help="Token-faithful rollouts of any agent harness for reinforcement learning, on Kafka.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(no_args_is_help=True)(serve.serve)
app.command(no_args_is_help=True, context_settings={"ignore_unknown_options": False})(commands.run)
app.command(no_args_is_help=True)(commands.submit)
app.command()(commands.status)
app.command(no_args_is_help=True)(commands.cancel)
app.command()(commands.trajectories)
app.command(no_args_is_help=True)(commands.show)
app.command()(operate.topics)
app.command()(operate.config)


def main() -> None:
    """The console script's entry."""
    app()


if __name__ == "__main__":
    main()
