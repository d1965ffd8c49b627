"""`polar rebuild`: trajectories again, from the calls on the log."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.bus.records import Encoded
from polar.client import PolarClient
from polar.schemas import BuilderSpec, Failure, FailureKind, Trajectory, encode
from polar.schemas.topics import LONGEST_SESSION_MS, retention_problems
from polar.schemas.wire import headers
from polar.service.settings import CommonSettings

from .outcomes import Outcome, Outcomes
from .output import BAD_INPUT, console, fail, json_line, new_client, run_async, settings_or_fail, warn
from .progress import Bar, bar
from .rebuild_check import BuiltThere, Finding
from .rebuild_report import MOST_NAMES, Tally, incomplete, report, summary
from .target import FileTarget, TopicTarget, check_file_name, check_topic_name, settings_of, to_file, to_topic
from .times import Window, window

if TYPE_CHECKING:
    from polar.builder.rebuild_select import Selection
    from polar.builder.rebuilding import Left, Rebuilder
    from polar.builder.settings import BuilderSettings

EXAMPLES = """\b
Examples:
  polar rebuild --builder per_request --since 2d --to-topic trajectories.per_request
  polar rebuild --builder prefix_merging --builder-config '{"on_drift": "break"}' \\
      --task 01a1fe23-7527-7581-8bb9-b504684bebd4 --to-file again.jsonl
  polar rebuild --check --since 1h

A rebuilt trajectory has the outcome and the latest reward that the log has of its session; --no-rewards leaves it as
the builder writes it. Ids derive from session, attempt and builder: the same rebuild again gives the same ids.

Exit codes: 0 all that was asked for was built (--check: and is the same), 1 something is missing or differs, 2 wrong
options.
"""


def rebuild(
    builder: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Strategy: prefix_merging, per_request, or one that POLAR_BUILDER_ALLOW names. Default: the one each "
            "session was built with.",
        ),
    ] = None,
    builder_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Its configuration, a JSON object; @FILE reads one.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Sessions closed since then: 2h, 3d ago, or a time like 2026-05-01T12:00Z."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Sessions closed before then.")] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this task's; repeatable.")] = None,
    session: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this session; repeatable.")] = None,
    to_topic_: Annotated[
        str | None,
        typer.Option("--to-topic", metavar="NAME", help="Publish there: a topic that is none of Polar's own."),
    ] = None,
    to_file_: Annotated[
        Path | None, typer.Option("--to-file", metavar="PATH", help="Write a new file: .jsonl or .msgpack.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the bytes in polar.built and name what differs.")
    ] = False,
    rewards: Annotated[
        bool, typer.Option("--rewards/--no-rewards", help="Join outcome and latest reward; close groups, too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Build trajectories again from the captured calls.

    From each session's first record up to its closing one, with the same or another builder. No engine, no box and no
    running service is needed; sessions of which the log has lost the start are named.
    """
    if sum((to_topic_ is not None, to_file_ is not None, check)) != 1:
        fail("choose one of --to-topic, --to-file and --check", code=BAD_INPUT)
    if check and builder is not None:
        fail("--check compares with what each session was built with: leave --builder out", code=BAD_INPUT)
    if builder is None and builder_config is not None:
        fail("--builder-config needs --builder: a session's own builder has its own", code=BAD_INPUT)
    settings = _builder_settings("builder", *(["evaluator"] if rewards and not check else []))
    spec = None if builder is None else BuilderSpec(strategy=builder, config=_config(builder_config))
    _check_builder(spec, settings)
    if to_file_ is not None:
        check_file_name(to_file_)
    client = new_client()
    if to_topic_ is not None:
        check_topic_name(to_topic_, client.bus.settings)
    times = window(since, until, client.clock.now_ms())
    state_dir = settings_or_fail(CommonSettings).state_dir
    rebuilding = _Rebuilding(
        times=times,
        tasks=frozenset(task or ()),
        sessions=frozenset(session or ()),
        spec=spec,
        settings=settings,
        folder=state_dir / "rebuild",
        rewards=rewards and not check,
    )

    async def main() -> None:
        # it tells of every session whose build is an error; here they are counted
        logging.getLogger("polar.builder.processor").setLevel(logging.ERROR)
        async with client:
            with bar() as progress:
                tally, left, told = await rebuilding.run(client, progress, to_topic_, to_file_)
            if as_json:
                json_line(summary(tally, left, told))
            else:
                report(console(), tally, left, told, times, check=check)
            if incomplete(tally, left, named=bool(task or session), check=check):
                raise typer.Exit(1)

    run_async(main)


@dataclass(frozen=True, slots=True)
class _Rebuilding:
    """One run of the command."""

    times: Window
    tasks: frozenset[str]
    sessions: frozenset[str]
    spec: BuilderSpec | None
    settings: BuilderSettings
    folder: Path
    rewards: bool

    async def run(
        self, client: PolarClient, progress: Bar, topic: str | None, file: Path | None
    ) -> tuple[Tally, Left, str]:
        from polar.builder.rebuilding import Rebuilder
        from polar.builder.texts import Tokenizers

        await self._warn_of_retention(client)
        tally = Tally()
        async with AsyncExitStack() as stack:
            rebuilder = await stack.enter_async_context(
                Rebuilder(
                    client.bus,
                    self._selection(),
                    spec=self.spec,
                    allowed=self.settings.allow,
                    tokenizers=Tokenizers(self.settings.tokenizers),
                    folder=self.folder,
                    memory_bytes=self.settings.memory_bytes,
                    watch=progress,
                )
            )
            await rebuilder.find()
            if topic is None and file is None:
                there = await stack.enter_async_context(BuiltThere(client.bus, self.folder, watch=progress))
                await there.gather(rebuilder.index.chosen)
                await self._compare(rebuilder, there, tally)
                return tally, await rebuilder.left(), "polar.built"
            outcomes = None
            if self.rewards:
                outcomes = await stack.enter_async_context(Outcomes(client.bus, self.folder, watch=progress))
                await outcomes.gather(rebuilder.index.chosen, await rebuilder.index.first_close_ms())
            # the targets' ends mean success: a file gets its name, a topic is flushed
            opened: AbstractAsyncContextManager[TopicTarget | FileTarget]
            if topic is not None:
                opened = to_topic(client.bus, topic)
            else:
                assert file is not None
                opened = to_file(file)
            async with opened as target:
                await self._publish(rebuilder, outcomes, target, tally, client.bus.settings.max_record_bytes)
            return tally, await rebuilder.left(), target.told()

    def _selection(self) -> Selection:
        from polar.builder.rebuild_select import Selection

        return Selection(self.times.since_ms, self.times.until_ms, self.tasks, self.sessions)

    async def _compare(self, rebuilder: Rebuilder, there: BuiltThere, tally: Tally) -> None:
        async with aclosing(rebuilder.trajectories()) as found:
            async for one in found:
                tally.add(one.trajectory)
                finding, difference = await there.compare(one.trajectory, one.value, one.closed_ms)
                if finding is Finding.SAME:
                    tally.same += 1
                elif finding is Finding.EXPIRED:
                    tally.expired += 1
                else:
                    tally.differing += 1
                    if len(tally.different) < MOST_NAMES:
                        tally.different[one.trajectory.session_id] = difference

    async def _publish(
        self,
        rebuilder: Rebuilder,
        outcomes: Outcomes | None,
        target: TopicTarget | FileTarget,
        tally: Tally,
        limit: int,
    ) -> None:
        async with aclosing(rebuilder.trajectories()) as found:
            async for one in found:
                tally.add(one.trajectory)
                closing = one.trajectory.closing
                more = headers(one.trajectory, source=closing)
                value = one.value
                if outcomes is not None:
                    known = await outcomes.of(one.trajectory.session_id)
                    await outcomes.built([one.trajectory.session_id])
                    if known is None:
                        tally.without_outcome += 1
                    else:
                        more.append(("reward-source", known.source.encode()))
                        value = _finished(one.trajectory, known, more, limit)
                        tally.rewarded += known.graded.grade is not None and known.graded.grade.reward is not None
                        tally.revised += known.revision > 0
                await target.put(one.trajectory.group_id, value, more)
        if outcomes is None:
            return
        async with aclosing(outcomes.groups()) as groups:
            async for group in groups:
                if group.missing:
                    tally.groups_in_part += 1
                    continue
                tally.groups += 1
                source = ("source", group.source.encode())
                await target.put(group.event.group_id, encode(group.event), [*headers(group.event), source])

    async def _warn_of_retention(self, client: PolarClient) -> None:
        """Says before the work that some of what is asked for may be lost."""
        if self.times.since_ms is None:
            return
        settings = client.bus.settings
        names = ["completions", *(["trajectories", "rewards"] if self.rewards else [])]
        found = await settings_of(client.bus, [settings.full(one) for one in names])
        kept = {one: int(found.get(settings.full(one), {}).get("retention.ms", "-1")) for one in names}
        back_ms = client.clock.now_ms() - self.times.since_ms
        for problem in retention_problems(kept, export_window_ms=back_ms, longest_session_ms=LONGEST_SESSION_MS):
            warn(f"sessions of that time may be lost: {problem}")


def _finished(trajectory: Trajectory, outcome: Outcome, more: list[tuple[str, bytes]], limit: int) -> bytes:
    """As the finisher does it, with its functions; also where the reward makes the record too large."""
    from polar.evaluator.finishing import bare, finished, without_traces

    found = finished(trajectory, outcome.graded)
    key = trajectory.group_id.encode()
    size = Encoded(key, encode(found), more).size
    if size > limit:
        message = f"the trajectory has {size} bytes, over the limit of {limit} for a record; raise "
        failure = Failure(kind=FailureKind.INFRA, message=f"{message}POLAR_KAFKA_MAX_RECORD_BYTES", stage="FINISHED")
        found = without_traces(found, failure)
        if Encoded(key, encode(found), more).size > limit:
            found = bare(found)
    return encode(found)


def _builder_settings(*services: str) -> BuilderSettings:
    """The builder's settings; ends with exit code 2 where one of the services that do the work is not installed."""
    from .serve import NotInstalled, load

    try:
        for name in services:
            load(name)
    except NotInstalled as error:
        fail(str(error), code=BAD_INPUT)
    from polar.builder.settings import BuilderSettings

    return settings_or_fail(BuilderSettings)


def _config(text: str | None) -> dict[str, Any]:
    """The object that `--builder-config` gives."""
    if text is None:
        return {}
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--builder-config: cannot read {text[1:]}: {error}", code=BAD_INPUT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(f"--builder-config is not JSON: {error}", code=BAD_INPUT)
    if not isinstance(found, dict):
        fail(f"--builder-config is not a JSON object: {text[:80]}", code=BAD_INPUT)
    return found


def _check_builder(spec: BuilderSpec | None, settings: BuilderSettings) -> None:
    """Ends with exit code 2 where the strategy or its configuration is wrong, before anything is read."""
    from polar.builder.config import ConfigWrong
    from polar.builder.registry import UnknownStrategy, load

    if spec is None:
        return
    try:
        load(spec.strategy, settings.allow)(spec)
    except UnknownStrategy as error:
        fail(f"--builder: {error}", code=BAD_INPUT)
    except ConfigWrong as error:
        fail(f"--builder-config: {error}", code=BAD_INPUT)
