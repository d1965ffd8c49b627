"""A task published to Kafka becomes a trajectory, on real parts; the engine alone is scripted."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from kafka import KafkaConsumer, KafkaProducer

from polar.client import PolarClient, TaskRefused
from polar.devmodel import Failure as EngineFailure
from polar.devmodel import Match, Reply, Rule, Script, ScriptedEngine
from polar.schemas import (
    AgentSpec,
    CustomShell,
    EvaluatorSpec,
    FailureKind,
    GroupClosed,
    PrepareAction,
    RuntimeSpec,
    Stage,
    StageChanged,
    Status,
    TaskRequest,
    Trajectory,
    decode,
)
from tests.e2e.stack import Stack, shell_agent

pytestmark = [pytest.mark.e2e, pytest.mark.sandbox, pytest.mark.timeout(240)]

MakeStack = Callable[..., Stack]


@pytest.fixture
async def stack(make_stack: MakeStack, engine: ScriptedEngine) -> AsyncIterator[Stack]:
    one = make_stack(engine.base_url)
    one.start("all")
    await asyncio.to_thread(one.wait_ready)
    yield one
    await asyncio.to_thread(one.stop)


def task(program: str, **fields: object) -> TaskRequest:
    """A task whose agent is a Python program of this text."""
    settings = {
        "task_id": f"task-{uuid.uuid4().hex[:8]}",
        "instruction": "do it",
        "agent": AgentSpec(harness="shell", custom_shell=CustomShell(command="python3 agent.py")),
        "runtime": RuntimeSpec(
            prepare=[PrepareAction(type="upload_file", target="/polar/session/workspace/agent.py", content=program)]
        ),
        "timeout_seconds": 60.0,
        **fields,
    }
    return TaskRequest(**settings)  # type: ignore[arg-type]


def calling(tmp_path: Path, turns: int = 2) -> str:
    script = tmp_path / "calling_agent.py"
    shell_agent(script, turns)
    return script.read_text()


async def ending(
    client: PolarClient, request: TaskRequest, timeout_s: float = 120
) -> tuple[list[Trajectory], GroupClosed]:
    """Submit a task; its trajectories and its group."""
    await client.submit(request)
    assert request.task_id is not None
    found: list[Trajectory] = []
    async with asyncio.timeout(timeout_s):
        async for event in client.trajectories(task_ids={request.task_id}):
            if isinstance(event, GroupClosed):
                return sorted(found, key=lambda one: one.sample), event
            found.append(event)
    raise AssertionError("the log ended")


async def test_polar_run_gives_a_group_with_rewards_and_every_sampled_token(
    stack: Stack, engine: ScriptedEngine, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    shell_agent(agent, turns=3)
    ran = await stack.apolar(
        "run", "--samples", "8", "--check", "test -s answer.txt", "--", "python3", "agent.py", cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + stack.tails()
    assert "mean reward 1.00" in ran.stdout
    async with PolarClient(stack.bus_settings()) as client:
        events = [event async for event in client.trajectories(follow=False)]
    trajectories = [one for one in events if isinstance(one, Trajectory)]
    (group,) = [one for one in events if isinstance(one, GroupClosed)]
    assert events[-1] is group
    assert sorted(one.sample for one in trajectories) == list(range(8))
    assert sorted(group.selection) == sorted(one.session_id for one in trajectories)
    sampled = sorted(ids for call in engine.calls for ids in call.ids)
    trained = []
    for one in trajectories:
        assert (one.status, one.reward, one.captured) == (Status.COMPLETED, 1.0, 3)
        (trace,) = one.traces
        view = one.view(trace)
        whole = np.concatenate([view.prompt_ids, view.response_ids])
        trained += [whole[turn.start : turn.end].tolist() for turn in trace.turns]
        assert int(view.loss_mask.sum()) == sum(turn.end - turn.start for turn in trace.turns)
        assert (view.response_logprobs[view.loss_mask == 1] < 0).all()
    assert sorted(trained) == sampled
    shown = await stack.apolar("show", trajectories[0].session_id)
    assert shown.returncode == 0, shown.stderr
    assert trajectories[0].session_id in shown.stdout


async def test_a_plain_kafka_client_publishes_json_and_reads_the_trajectory(stack: Stack, tmp_path: Path) -> None:
    body = {
        "task_id": "foreign",
        "instruction": "do it",
        "num_samples": 2,
        "agent": {"harness": "shell", "custom_shell": {"command": "python3 agent.py"}},
        "runtime": {
            "prepare": [
                {
                    "type": "upload_file",
                    "target": "/polar/session/workspace/agent.py",
                    "content": calling(tmp_path),
                }
            ]
        },
        "evaluator": {"strategy": "command", "config": {"command": "echo '{\"reward\": 0.25}'"}},
    }

    def exchange() -> list[Trajectory | GroupClosed]:
        bootstrap = stack.env["POLAR_KAFKA_BOOTSTRAP"]
        producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
        producer.send(f"{stack.prefix}tasks", key=b"foreign", value=json.dumps(body).encode()).get(30)
        producer.close()
        consumer = KafkaConsumer(
            f"{stack.prefix}trajectories",
            bootstrap_servers=bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            consumer_timeout_ms=90_000,
            max_partition_fetch_bytes=16 * 1024 * 1024,
        )
        found: list[Trajectory | GroupClosed] = []
        for message in consumer:
            event = decode(message.value, (Trajectory, GroupClosed))
            assert isinstance(event, Trajectory | GroupClosed)
            found.append(event)
            if isinstance(event, GroupClosed):
                break
        consumer.close()
        return found

    *trajectories, group = await asyncio.to_thread(exchange)
    assert isinstance(group, GroupClosed), stack.tails()
    assert [one.reward for one in trajectories] == [0.25, 0.25]
    assert len({one.session_id for one in trajectories}) == 2


async def test_kcat_publishes_a_task_and_its_trajectories_come(stack: Stack, tmp_path: Path) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("needs kcat")
    body = json.dumps(
        {
            "task_id": "by-kcat",
            "instruction": "do it",
            "agent": {"harness": "shell", "custom_shell": {"command": "python3 agent.py"}},
            "runtime": {
                "prepare": [
                    {
                        "type": "upload_file",
                        "target": "/polar/session/workspace/agent.py",
                        "content": calling(tmp_path),
                    }
                ]
            },
        }
    )
    address = ["-b", stack.env["POLAR_KAFKA_BOOTSTRAP"], "-t", f"{stack.prefix}tasks"]
    asked = await asyncio.create_subprocess_exec(kcat, "-P", *address, "-k", "by-kcat", stdin=asyncio.subprocess.PIPE)
    await asked.communicate(body.encode())
    assert asked.returncode == 0
    async with PolarClient(stack.bus_settings()) as client, asyncio.timeout(60):
        async for event in client.trajectories(task_ids={"by-kcat"}):
            if isinstance(event, GroupClosed):
                break
            assert event.status is Status.COMPLETED
            assert event.reward == 1.0


async def test_each_way_a_harness_fails_ends_in_its_kind_with_its_last_output(stack: Stack, tmp_path: Path) -> None:
    wrong_key = calling(tmp_path).replace('os.environ["OPENAI_API_KEY"]', '"sk-wrong"')
    cases = {
        "exit": (task("import sys; print('giving up'); sys.exit(3)"), FailureKind.HARNESS, "giving up"),
        "start": (
            task("", agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="no-such-program --flag"))),
            FailureKind.HARNESS,
            "no-such-program",
        ),
        "key": (task(wrong_key), FailureKind.HARNESS, "401"),
        "silent": (task("print('I never call a model')"), FailureKind.NO_COMPLETIONS, ""),
        "prepare": (
            task("", runtime=RuntimeSpec(prepare=[PrepareAction(type="exec", command="echo broken; exit 7")])),
            FailureKind.TASK,
            "",
        ),
    }
    async with PolarClient(stack.bus_settings()) as client:
        endings = await asyncio.gather(*(ending(client, request) for request, _, _ in cases.values()))
    for (name, (_, kind, said)), ((one,), group) in zip(cases.items(), endings, strict=True):
        failure = one.outcome.failure
        assert failure is not None, name
        assert failure.kind is kind, f"{name}: {failure}"
        assert said in str(failure.detail) + failure.message, f"{name}: {failure}"
        assert one.reward is None, name
        assert one.status is Status.ERROR
        assert [member.session_id for member in group.members] == [one.session_id]
        assert group.selection == []


async def test_with_the_model_down_the_session_says_provider(make_stack: MakeStack, tmp_path: Path) -> None:
    rule = Rule(match=Match(), replies=[Reply(error=EngineFailure(status=500, message="the engine broke"))])
    async with ScriptedEngine(Script([rule])) as broken:
        stack = make_stack(broken.base_url)
        stack.start("all")
        await asyncio.to_thread(stack.wait_ready)
        async with PolarClient(stack.bus_settings()) as client:
            (one,), _ = await ending(client, task(calling(tmp_path)))
        assert one.outcome.failure is not None
        assert one.outcome.failure.kind is FailureKind.PROVIDER, one.outcome
        assert one.reward is None
        assert one.failed >= 1
        assert {aside.reason for aside in one.set_aside} == {"failed"}


async def test_a_session_cancelled_while_queued_never_runs(make_stack: MakeStack, engine: ScriptedEngine) -> None:
    stack = make_stack(engine.base_url)
    stack.start("submit", "submit", "proxy", "builder", "evaluator")
    await asyncio.to_thread(stack.wait_ready)
    request = task("print('never')")
    assert request.task_id is not None
    async with PolarClient(stack.bus_settings()) as client:
        await client.submit(request)
        await client.cancel(request.task_id)
        async with asyncio.timeout(60):
            async for event in client.trajectories(task_ids={request.task_id}):
                if isinstance(event, Trajectory):
                    assert event.status is Status.CANCELLED
                    assert event.traces == []
                else:
                    assert event.selection == []
                    break
    assert engine.calls == []


async def test_time_runs_out_with_two_calls_in_flight(stack: Stack, engine: ScriptedEngine) -> None:
    agent = """import json, os, threading, urllib.request
def call(text):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return urllib.request.urlopen(request, timeout=60).read()
call("quick")
threads = [threading.Thread(target=call, args=("hang %d" % i,)) for i in range(2)]
[one.start() for one in threads]
[one.join() for one in threads]
"""
    engine.scripted.script = Script([Rule(match=Match(last_user="hang"), replies=[Reply(text="late", gate="never")])])
    async with PolarClient(stack.bus_settings()) as client:
        (one,), group = await ending(client, task(agent, timeout_seconds=4.0))
    assert one.status is Status.TIMEOUT
    assert one.captured == 1
    assert [len(trace.turns) for trace in one.traces] == [1]
    assert len(one.set_aside) == 2, one.set_aside
    assert one.reward == 0.0  # session_completed grades a timeout: 0
    assert group.selection == [one.session_id]
    await engine.until(lambda stats: stats.running == 0, timeout=60)


async def test_a_session_whose_gateway_dies_runs_again_elsewhere(
    make_stack: MakeStack, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.scripted.script = Script(
        [Rule(match=Match(last_user="turn 1"), replies=[Reply(text="slow", gate="second")])]
    )
    stack = make_stack(engine.base_url)
    stack.start("core", "submit", "proxy", "builder", "evaluator")
    stack.start("first", "gateway", env={"POLAR_GATEWAY_NODE_ID": "first"})
    await asyncio.to_thread(stack.wait_ready)
    async with PolarClient(stack.bus_settings()) as client:
        request = task(calling(tmp_path))
        accepted = await client.submit(request)
        await engine.until(lambda stats: stats.running == 1, timeout=60)
        stack.kill("first")
        stack.start(
            "second",
            "gateway",
            env={
                "POLAR_GATEWAY_NODE_ID": "second",
                "POLAR_STATE_DIR": str(stack.root / "state2"),
                "POLAR_TOKEN_SECRET": (stack.root / "state" / "token-secret").read_text(),
                "POLAR_KAFKA_BLOB_URL": (stack.root / "state" / "blobs").as_uri(),
            },
        )
        engine.open("second")
        async with asyncio.timeout(120):
            async for event in client.trajectories(task_ids={accepted.task_id}):
                if isinstance(event, Trajectory):
                    assert event.attempt == 2
                    assert event.status is Status.COMPLETED
                    assert event.captured == 2
                    assert "fenced" in {aside.reason for aside in event.set_aside}
                else:
                    break


async def test_a_group_of_eight_with_one_infrastructure_failure(
    make_stack: MakeStack, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.scripted.script = Script([Rule(match=Match(last_user="turn 1"), replies=[Reply(text="on", gate="go")])])
    stack = make_stack(engine.base_url)
    stack.start("core", "submit", "proxy", "builder", "evaluator")
    one_slot = {"POLAR_GATEWAY_INIT_SLOTS": "1", "POLAR_GATEWAY_READY_SLOTS": "0", "POLAR_GATEWAY_RUN_SLOTS": "1"}
    stack.start("doomed", "gateway", env={"POLAR_GATEWAY_NODE_ID": "doomed", **one_slot})
    await asyncio.to_thread(stack.wait_ready)
    async with PolarClient(stack.bus_settings()) as client:
        accepted = await client.submit(task(calling(tmp_path), num_samples=8, max_attempts=1))
        await engine.until(lambda stats: stats.running == 1, timeout=60)
        stack.kill("doomed")
        stack.start(
            "sound",
            "gateway",
            env={
                "POLAR_GATEWAY_NODE_ID": "sound",
                "POLAR_STATE_DIR": str(stack.root / "state2"),
                "POLAR_TOKEN_SECRET": (stack.root / "state" / "token-secret").read_text(),
                "POLAR_KAFKA_BLOB_URL": (stack.root / "state" / "blobs").as_uri(),
            },
        )
        engine.open("go")
        found: list[Trajectory] = []
        async with asyncio.timeout(120):
            async for event in client.trajectories(task_ids={accepted.task_id}):
                if isinstance(event, GroupClosed):
                    break
                found.append(event)
    kinds = [one.outcome.failure.kind for one in found if one.outcome.failure is not None]
    assert kinds == [FailureKind.INFRA], [one.outcome for one in found]
    assert len(event.members) == 8
    assert len(event.selection) == 7
    (lost,) = [member for member in event.members if member.reward is None]
    assert lost.session_id not in event.selection


async def test_bad_tasks_are_refused_at_both_doors(stack: Stack) -> None:
    async with PolarClient(stack.bus_settings()) as client:
        for fields, field in (
            ({"timeout_seconds": -1.0}, "timeout_seconds"),
            ({"agent": AgentSpec(harness="codex")}, "agent.harness"),
            ({"agent": AgentSpec(harness="nonsense")}, "agent.harness"),
            ({"runtime": RuntimeSpec(backend="docker")}, "runtime.backend"),
            ({"evaluator": EvaluatorSpec(strategy="judge")}, "evaluator.strategy"),
            ({"task_id": "../../etc"}, "task_id"),
        ):
            with pytest.raises(TaskRefused) as refused:
                await client.submit(task("", **fields))  # type: ignore[arg-type]
            assert field in [one.field for one in refused.value.problems]
        request = task("print(1)")
        await client.submit(request)
        await client.submit(request)
        with pytest.raises(TaskRefused) as conflict:
            await client.submit(task("print(2)", task_id=request.task_id))
        assert [one.code for one in conflict.value.problems] == ["conflict"]
        reader = await client.bus.reader(["dead"])
        letters = [record.value async for record in reader.to_end()]
        await reader.close()
    assert len(letters) == 6


async def test_an_instruction_of_5_mb_reaches_the_agent_whole(stack: Stack) -> None:
    agent = """import hashlib, json, os, urllib.request
print(hashlib.sha256(open(os.environ["POLAR_INSTRUCTION_FILE"], "rb").read()).hexdigest())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
    "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})).read()
"""
    long = "tell me all of it. " * 270_000
    import hashlib

    async with PolarClient(stack.bus_settings()) as client:
        (one,), _ = await ending(client, task(agent, instruction=long))
        assert one.status is Status.COMPLETED, one.outcome
        log = next(artifact for artifact in one.artifacts if artifact.name.startswith("logs/"))
        text = (await client.bus.blobs.get(log.claim)).decode()
    assert hashlib.sha256(long.encode()).hexdigest() in text


async def test_stages_tell_the_way_of_a_session_in_order(stack: Stack, tmp_path: Path) -> None:
    request = task(calling(tmp_path))
    async with PolarClient(stack.bus_settings()) as client:
        accepted = await client.submit(request)
        seen: list[Stage] = []
        async with asyncio.timeout(60):
            async for event in client.stages(accepted.task_id, since_ms=accepted.at_ms - 1000):
                if isinstance(event, StageChanged):
                    seen.append(event.stage)
    assert seen == [
        Stage.INITIALIZING,
        Stage.READY,
        Stage.RUNNING,
        Stage.ENDED,
        Stage.CLOSED,
        Stage.BUILT,
        Stage.EVALUATING,
        Stage.GRADED,
        Stage.FINISHED,
    ]


def test_with_no_broker_serve_says_in_one_line_what_to_do(tmp_path: Path) -> None:
    stack = Stack(
        tmp_path, "127.0.0.1:1", "http://127.0.0.1:1/v1", prefix="x.", env={"POLAR_KAFKA_CONNECT_TIMEOUT_S": "2"}
    )
    ended = stack.polar("serve", "builder")
    assert ended.returncode != 0
    assert "POLAR_KAFKA_BOOTSTRAP" in ended.stderr
    assert "Traceback" not in ended.stderr
