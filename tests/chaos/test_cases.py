"""Cases that a drawn schedule may miss, each brought about step by step and asserted to have happened."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from polar.client import PolarClient
from polar.devmodel import Match, Reply, Rule, Script, ScriptedEngine
from polar.schemas import (
    AttemptFenced,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    SessionClosed,
    SessionFinal,
    Stage,
    StageChanged,
    Status,
    TaskRequest,
    Tick,
    Trajectory,
)

from .checks import check_log
from .conftest import Install
from .faults import STUCK_S
from .installation import SUBMITS, Installation
from .witness import Witness, witnessing
from .work import AGENT, conversation, ended, settled, task_of

pytestmark = [pytest.mark.chaos, pytest.mark.sandbox, pytest.mark.timeout(900)]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(Script()) as one:
        yield one


def held(engine: ScriptedEngine, *gates: tuple[str, str]) -> None:
    """The first call whose last message has a text waits at a gate."""
    engine.scripted.script = Script(
        [Rule(match=Match(last_user=text), replies=[Reply(text="On.", gate=gate)], times=1) for text, gate in gates]
    )


async def at_engine(engine: ScriptedEngine, *, finished: int, running: int) -> None:
    await engine.until(lambda stats: (stats.finished, stats.running) == (finished, running), timeout=STUCK_S)


async def ready(stack: Installation) -> None:
    await asyncio.to_thread(stack.wait_ready, STUCK_S)


async def submitted(client: PolarClient, task: TaskRequest) -> str:
    """The id of the task's one session."""
    (session,) = (await client.submit(task, timeout_s=STUCK_S)).sessions
    return session


async def trajectory_of(witness: Witness, session: str) -> Trajectory:
    found = await witness.until(lambda: witness.all(Trajectory, session_id=session), f"trajectory of {session}")
    return found[0]


def in_traces(trajectory: Trajectory) -> list[str]:
    return [turn.completion_id for trace in trajectory.traces for turn in trace.turns]


async def test_an_attempt_whose_gateway_wakes_after_its_fence(
    bootstrap: str, engine: ScriptedEngine, install: Install
) -> None:
    held(engine, ("turn 1", "first attempt"), ("turn 2", "second attempt"))
    stack = install(bootstrap, engine.base_url)
    stack.start("core", "submit", "proxy", "builder", "evaluator")
    stack.start_gateway("gateway-a")
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "completions", "stages", "trajectories") as witness,
    ):
        task = task_of(conversation(3))
        session = await submitted(client, task)
        await at_engine(engine, finished=1, running=1)
        await asyncio.to_thread(stack.pause, "gateway-a")
        stack.start_gateway("gateway-b")
        await witness.until(lambda: witness.all(AttemptFenced, session_id=session), "the attempt is fenced")
        # the second attempt holds at its last call while the first one wakes and calls
        await witness.until(lambda: witness.all(CompletionCaptured, session_id=session, call=1, attempt=2), "a retry")
        stack.resume("gateway-a")
        woken = await witness.until(
            lambda: witness.all(StageChanged, session_id=session, attempt=1, stage=Stage.ENDED), "the first one ends"
        )
        engine.open("first attempt")
        engine.open("second attempt")
        await trajectory_of(witness, session)
        await settled(client, stack)
        await witness.to_end()
        (trajectory,) = witness.all(Trajectory, session_id=session)
        await check_log(client, engine, [session], [trajectory])
    (fenced,) = witness.all(AttemptFenced, session_id=session)
    assert woken[0].node == "gateway-a"
    assert woken[0].at_ms > fenced.at_ms
    assert (trajectory.attempt, trajectory.status, trajectory.reward) == (2, Status.COMPLETED, 1.0)
    started = {one.completion_id: one.attempt for one in witness.all(CallStarted, session_id=session)}
    assert Counter(started.values()) == {1: 2, 2: 3}, "the fenced attempt started no call after its fence"
    assert [started[one] for one in in_traces(trajectory)] == [2, 2, 2]
    assert {one.completion_id for one in trajectory.set_aside} == {one for one in started if started[one] == 1}
    assert {one.reason for one in trajectory.set_aside} == {"fenced"}


ONE_UNANSWERED = """
messages = [{"role": "user", "content": "turn 0"}]
messages.append({"role": "assistant", "content": ask(messages)})
messages.append({"role": "user", "content": "turn 1"})
body = json.dumps({"model": "policy", "messages": messages}).encode()
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}))
except (OSError, http.client.HTTPException):
    open("answer.txt", "w").write("enough")
"""


async def test_a_call_that_never_ends_is_open_when_the_session_closes(
    bootstrap: str, engine: ScriptedEngine, install: Install
) -> None:
    held(engine, ("turn 1", "never"))
    stack = install(bootstrap, engine.base_url)
    stack.start("core", "submit", "gateway", "builder", "evaluator")
    stack.start("proxy")
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "completions", "trajectories") as witness,
    ):
        session = await submitted(client, task_of(AGENT + ONE_UNANSWERED))
        await at_engine(engine, finished=1, running=1)
        stack.kill("proxy")
        trajectory = await trajectory_of(witness, session)
        await settled(client, stack)
        await witness.to_end()
        await check_log(client, engine, [session], [trajectory])
    life = witness.life(session)
    (closed,) = [offset for offset, one in life if isinstance(one, SessionClosed)]
    (final,) = [offset for offset, one in life if isinstance(one, SessionFinal)]
    first, second = [(offset, one.completion_id) for offset, one in life if isinstance(one, CallStarted)]
    ends = [one.completion_id for _, one in life if isinstance(one, CompletionCaptured | CompletionFailed)]
    assert ends == [first[1]], "the second call has no end"
    assert second[0] < closed < final
    assert trajectory.closing.offset == final
    assert (trajectory.status, trajectory.reward, trajectory.captured) == (Status.COMPLETED, 1.0, 1)
    assert in_traces(trajectory) == [first[1]]
    assert [(one.completion_id, one.reason) for one in trajectory.set_aside] == [(second[1], "unfinished")]


async def test_a_call_ends_after_its_session_is_closed(
    bootstrap: str, engine: ScriptedEngine, install: Install
) -> None:
    held(engine, ("turn 1", "never"))
    # a grace that no test waits for: the call's end has to be what the builder builds at
    stack = install(bootstrap, engine.base_url, env={"POLAR_SCHEDULER_FINAL_GRACE": "600"})
    stack.start("core", "submit", "gateway", "builder", "evaluator")
    stack.start("proxy")
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "completions", "trajectories") as witness,
    ):
        task = task_of(conversation(2))
        session = await submitted(client, task)
        await at_engine(engine, finished=1, running=1)
        await asyncio.to_thread(stack.pause, "proxy")
        assert task.task_id is not None
        await client.cancel(task.task_id)
        await witness.until(lambda: witness.all(SessionClosed, session_id=session), "the session is closed")
        assert not witness.all(Trajectory)
        stack.resume("proxy")
        trajectory = await trajectory_of(witness, session)
    life = witness.life(session)
    (closed,) = [offset for offset, one in life if isinstance(one, SessionClosed)]
    _, second = [(offset, one.completion_id) for offset, one in life if isinstance(one, CallStarted)]
    *_, (last, end) = [(offset, one) for offset, one in life if isinstance(one, CompletionCaptured | CompletionFailed)]
    assert isinstance(end, CompletionFailed)
    assert end.completion_id == second[1]
    assert second[0] < closed < last
    assert trajectory.closing.offset == last
    assert (trajectory.status, trajectory.captured, trajectory.failed) == (Status.CANCELLED, 1, 1)
    assert [(one.completion_id, one.reason) for one in trajectory.set_aside] == [(second[1], "failed")]


@pytest.mark.parametrize("built", [True, False], ids=["after it built the first", "before it built the first"])
async def test_a_builder_killed_between_two_sessions_that_interleave_in_one_partition(
    bootstrap: str, engine: ScriptedEngine, install: Install, built: bool
) -> None:
    held(engine, ("turn 1 of one", "one"), ("turn 1 of two", "two"))
    stack = install(bootstrap, engine.base_url, env={"POLAR_KAFKA_PARTITIONS": "1"})
    stack.start("core", "submit", "proxy", "gateway", "evaluator")
    stack.start("builder")
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "completions", "stages", "built", "trajectories") as witness,
    ):
        one, two = [await submitted(client, task_of(conversation(3, name))) for name in ("one", "two")]
        await at_engine(engine, finished=2, running=2)
        if not built:
            await asyncio.to_thread(stack.pause, "builder")
        engine.open("one")
        await witness.until(lambda: witness.all(SessionClosed, session_id=one), "the first session is closed")
        if built:
            await witness.until(lambda: witness.all(StageChanged, session_id=one, stage=Stage.BUILT), "it is built")
        await witness.to_end()
        assert len(witness.all(StageChanged, stage=Stage.BUILT)) == built
        before = max(offset for offset, _ in witness.life(two))
        stack.kill("builder", signal.SIGKILL)
        stack.restart("builder")
        await witness.until(lambda: witness.all(StageChanged, session_id=one, stage=Stage.BUILT), "it is built now")
        engine.open("two")
        await trajectory_of(witness, two)
        await settled(client, stack)
        await witness.to_end()
        published = [one for one in witness.records if one.topic == "trajectories"]
        trajectories = [one.value for one in published if isinstance(one.value, Trajectory)]
        await check_log(client, engine, [one, two], trajectories)
    offsets = {session: [offset for offset, _ in witness.life(session)] for session in (one, two)}
    assert min(offsets[two]) < max(offsets[one]) < max(offsets[two])
    assert min(offsets[two]) < before < max(offsets[two]), "the builder was killed in the middle of the second"
    for trajectory in trajectories:
        captured = witness.all(CompletionCaptured, session_id=trajectory.session_id)
        assert in_traces(trajectory) == [one.completion_id for one in captured]
        assert (trajectory.status, trajectory.captured, trajectory.set_aside) == (Status.COMPLETED, 3, [])


async def test_a_paused_leader_that_wakes_writes_nothing(
    bootstrap: str, engine: ScriptedEngine, install: Install
) -> None:
    held(engine, ("turn 1", "on"))
    stack = install(bootstrap, engine.base_url)
    for name in SUBMITS:
        stack.start_submit(name)
    stack.start("core", "proxy", "gateway", "builder", "evaluator")
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "nodes", "completions", "trajectories") as witness,
    ):
        session = await submitted(client, task_of(conversation(2)))
        await at_engine(engine, finished=1, running=1)
        old = stack.leader()
        assert old is not None
        await asyncio.to_thread(stack.pause, old)
        await witness.to_end()
        before = len(witness.all(Tick))
        deposed = witness.all(Tick)[-1].leader_id
        await witness.until(lambda: {one.leader_id for one in witness.all(Tick)[before:]} - {deposed}, "a take-over")
        lines = stack.lines(old)
        stack.resume(old)
        await witness.until(lambda: stack.lines(old) > lines, "the old leader says that it was fenced")
        engine.open("on")
        trajectory = await trajectory_of(witness, session)
        await settled(client, stack)
        await witness.to_end()
        await check_log(client, engine, [session], [trajectory])
    assert deposed not in {one.leader_id for one in witness.all(Tick)[before:]}
    assert (trajectory.attempt, trajectory.status) == (1, Status.COMPLETED)


async def test_a_paused_builder_and_evaluator_that_wake_publish_nothing_twice(
    bootstrap: str, engine: ScriptedEngine, install: Install
) -> None:
    held(engine, ("turn 1", "on"))
    stack = install(bootstrap, engine.base_url, env={"POLAR_KAFKA_PARTITIONS": "1"})
    stack.start("core", "submit", "proxy", "gateway")
    stack.start("builder")
    stack.start("evaluator", env={"POLAR_EVALUATOR_NODE_ID": "first"})
    await ready(stack)
    async with (
        PolarClient(stack.bus_settings()) as client,
        witnessing(client, stack, "stages", "trajectories") as witness,
    ):
        first = await submitted(client, task_of(conversation(2)))
        await at_engine(engine, finished=1, running=1)
        for name in ("builder", "evaluator"):
            await asyncio.to_thread(stack.pause, name)
        stack.start("builder-b", "builder", env=stack.own("builder-b"))
        stack.start("evaluator-b", "evaluator", env={**stack.own("evaluator-b"), "POLAR_EVALUATOR_NODE_ID": "second"})
        engine.open("on")
        await trajectory_of(witness, first)
        lines = {name: stack.lines(name) for name in ("builder", "evaluator")}
        for name in lines:
            stack.resume(name)
        await witness.until(lambda: all(stack.lines(name) > lines[name] for name in lines), "they say that they woke")
        task = task_of(conversation(2), num_samples=8)
        accepted = await client.submit(task, timeout_s=STUCK_S)
        rest = await ended(client, {accepted.task_id}, stack)
        await settled(client, stack)
        await witness.to_end()
        (one,) = witness.all(Trajectory, session_id=first)
        await check_log(client, engine, [first, *accepted.sessions], [one, *rest])
