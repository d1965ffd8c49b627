"""A session on a node, from its assignment to its release, over real Kafka and in real boxes."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from msgspec.structs import replace

from polar.bus import Out
from polar.gateway.boxes import LABEL
from polar.runtime import BoxSpec, create_runtime
from polar.schemas import (
    FailureKind,
    PrepareAction,
    Stage,
    StageChanged,
)
from polar.service.tokens import verify_session
from tests.gateway.desk import NODE, WAIT_AT_DOOR, Desk, ModelDoor, Site, shell_task

WHOLE = [Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED]


async def artifacts(desk: Desk, report: StageChanged) -> dict[str, bytes]:
    return {one.name: await desk.bus.blobs.get(one.claim) for one in report.artifacts}


async def test_a_session_goes_through_all_stages_and_its_files_are_kept(desk: Desk, door: ModelDoor, site: Site):
    door.open.set()
    command = f"""
        cat data/greeting "$POLAR_INSTRUCTION_FILE"; echo; echo "$POLAR_INSTRUCTION"
        {WAIT_AT_DOOR}
        echo work > fix.patch; echo kept > "$ARTIFACTS_DIR/extra.txt"
        echo said > "$LOGS_DIR/agent.log"; echo no > other
    """
    prepare = [
        PrepareAction(type="exec", command="mkdir data; echo $SESSION_ID > data/who"),
        PrepareAction(type="upload_file", target="data/greeting", content="good morning\n"),
    ]
    async with site.gateway():
        event = await desk.assign(await desk.boot(), shell_task(command, prepare=prepare, artifacts=["**/*.patch"]))
        ended = await desk.reached(event, Stage.ENDED)
        assert desk.stages(event) == WHOLE
        assert [(one.assignment_id, one.box_id) for one in desk.ready] == [(event.assignment_id, site.box(event))]
        assert ended.failure is None
        assert ended.exit is not None
        assert (ended.exit.reason, ended.exit.exit_code) == ("exited", 0)
        assert ended.exit.output_tail == "good morning\nSay hello.\nSay hello.\nhello from the model\n"
        assert await artifacts(desk, ended) == {
            "logs/harness.log": ended.exit.output_tail.encode(),
            "logs/agent.log": b"said\n",
            "artifacts/extra.txt": b"kept\n",
            "fix.patch": b"work\n",
        }
        assert {"init_wait", "init", "ready_wait", "run", "collect"} <= ended.timing_ms.keys()
        assert {one.node for one in desk.of(event)} == {"node-1"}

        (key,) = door.keys
        token = verify_session(key, site.secret, ended.at_ms)
        assert (token.session_id, token.attempt, token.model) == (event.session_id, 1, "policy")
        assert key.encode() not in (site.folder / "state.sqlite").read_bytes()

        await desk.beat(lambda beat: [one.stage for one in beat.held] == ["ENDED"])
        assert (site.box_folder(event) / "session" / "workspace" / "fix.patch").exists()
        await desk.release(event)
        await desk.beat(lambda beat: beat.held == [])
        assert not site.box_folder(event).exists()


async def test_another_exit_code_is_reported_with_the_last_output(desk: Desk, site: Site):
    async with site.gateway(output_tail_bytes=100):
        task = shell_task("seq 1000 | xargs echo; echo 'cannot go on' >&2; exit 3")
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.retryable) == (FailureKind.HARNESS, False)
    assert ended.exit is not None
    assert ended.exit.exit_code == 3
    assert ended.exit.output_tail.endswith("cannot go on\n")
    assert len(ended.exit.output_tail) <= 100


async def test_a_printed_key_is_masked_in_what_is_kept(desk: Desk, door: ModelDoor, site: Site):
    door.open.set()
    async with site.gateway():
        event = await desk.assign(await desk.boot(), shell_task(f'echo "$OPENAI_API_KEY"; {WAIT_AT_DOOR}; exit 1'))
        ended = await desk.reached(event, Stage.ENDED)
        assert ended.exit is not None
        assert ended.exit.output_tail == "***\nhello from the model\n"
        assert (await artifacts(desk, ended))["logs/harness.log"] == b"***\nhello from the model\n"
        assert verify_session(door.keys[0], site.secret, ended.at_ms).session_id == event.session_id


async def test_an_agent_whose_time_is_up_is_dead_with_all_its_children_before_it_is_told(desk: Desk, site: Site):
    task = shell_task("echo begun > work.txt; setsid sleep 1000 & sleep 1000", timeout_seconds=1.0, artifacts=["*.txt"])
    async with site.gateway():
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
        assert await site.processes(event) == []
        assert ended.exit is not None
        assert ended.exit.reason == "timeout"
        assert ended.failure is not None
        assert ended.failure.kind is FailureKind.TIMEOUT
        assert await artifacts(desk, ended) == {"work.txt": b"begun\n"}
        assert site.box_folder(event).exists()  # to be graded


async def test_a_revoked_harness_is_dead_before_it_is_told(desk: Desk, door: ModelDoor, site: Site):
    async with site.gateway():
        event = await desk.assign(await desk.boot(), shell_task(f"echo here; sleep 1000 & {WAIT_AT_DOOR}"))
        await door.knocks(1)
        assert await site.processes(event) != []
        await desk.revoke(event)
        ended = await desk.reached(event, Stage.ENDED)
        assert await site.processes(event) == []
        assert ended.exit is not None
        assert (ended.exit.reason, ended.exit.output_tail) == ("revoked", "here\n")
        assert ended.failure is not None
        assert (ended.failure.kind, ended.failure.message) == (FailureKind.CANCELLED, "cancelled by a test")
        assert desk.stages(event) == WHOLE
        await desk.release(event)
        await desk.beat(lambda beat: beat.held == [])


async def test_a_revoke_while_the_box_is_prepared_ends_the_preparation(desk: Desk, site: Site):
    task = shell_task("true", prepare=[PrepareAction(type="exec", command="sleep 1000")])
    async with site.gateway():
        event = await desk.assign(await desk.boot(), task)
        await desk.reached(event, Stage.INITIALIZING)
        await desk.revoke(event)
        ended = await desk.reached(event, Stage.ENDED)
        assert await site.processes(event) == []
        assert ended.exit is not None
        assert ended.exit.reason == "revoked"
        assert desk.stages(event) == [Stage.INITIALIZING, Stage.ENDED]


async def test_a_release_of_what_still_runs_ends_it_and_takes_the_box(desk: Desk, door: ModelDoor, site: Site):
    async with site.gateway():
        event = await desk.assign(await desk.boot(), shell_task(WAIT_AT_DOOR))
        await door.knocks(1)
        await desk.release(event)
        await desk.reached(event, Stage.ENDED)
        await desk.beat(lambda beat: beat.held == [])
        assert not site.box_folder(event).exists()
        assert await site.processes(event) == []


async def test_unknown_sessions_and_other_boots_are_ignored(desk: Desk, site: Site):
    async with site.gateway():
        boot = await desk.boot()
        stranger = desk.assignment(boot, shell_task("true"))
        await desk.revoke(stranger)
        await desk.release(stranger)
        old = await desk.assign("another boot", shell_task("true"))
        event = await desk.assign(boot, shell_task("true"))
        await desk.bus.send(Out("assignments", NODE, event), Out("assignments", NODE, event))
        await desk.reached(event, Stage.ENDED)
        beat = await desk.beat(lambda beat: len(beat.held) == 1)
        assert beat.read_to >= 0
    assert desk.of(old) == []
    assert desk.of(stranger) == []
    assert desk.stages(event) == WHOLE


async def test_a_prepare_command_that_fails_is_the_task_s_failure(desk: Desk, site: Site):
    task = shell_task("true", prepare=[PrepareAction(type="exec", command="echo no such package; exit 9")])
    async with site.gateway():
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
        assert ended.failure is not None
        assert (ended.failure.kind, ended.failure.retryable) == (FailureKind.TASK, False)
        assert ended.failure.detail == {"exit_code": 9, "output_tail": "no such package\n"}
        assert "runtime.prepare[0]" in ended.failure.message
        await desk.beat(lambda beat: [one.stage for one in beat.held] == ["ENDED"])
        assert not site.box_folder(event).exists()  # nothing to grade in it


async def test_preparing_has_a_time_of_its_own(desk: Desk, site: Site):
    task = shell_task("true", init_timeout=1.0, prepare=[PrepareAction(type="exec", command="sleep 1000")])
    async with site.gateway():
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.retryable) == (FailureKind.INFRA, True)
    assert "init_timeout" in ended.failure.message
    assert await site.processes(event) == []


async def test_files_of_the_machine_are_copied_only_from_folders_the_operator_shares(
    desk: Desk, site: Site, tmp_path: Path
):
    shared = tmp_path / "shared"
    (shared / "repo").mkdir(parents=True)
    (shared / "repo" / "main.py").write_text("print('shared')\n")
    (shared / "out").symlink_to("/etc")
    async with site.gateway(upload_roots=[shared]):
        boot = await desk.boot()
        good = await desk.assign(
            boot,
            shell_task(
                "python3 repo/main.py",
                prepare=[PrepareAction(type="upload_dir", source=str(shared / "repo"), target="repo")],
            ),
        )
        bad = [
            await desk.assign(
                boot, shell_task("true", prepare=[PrepareAction(type="upload_file", source=source, target="x")])
            )
            for source in ("/etc/passwd", str(shared / "out" / "passwd"))
        ]
        ended = await desk.reached(good, Stage.ENDED)
        assert ended.exit is not None
        assert ended.exit.output_tail == "shared\n"
        for event in bad:
            refused = await desk.reached(event, Stage.ENDED)
            assert refused.failure is not None
            assert refused.failure.kind is FailureKind.TASK


async def test_a_long_instruction_comes_out_of_the_blob_store(desk: Desk, site: Site):
    text = "long " * 50_000
    claim = await desk.bus.blobs.put(text.encode(), "text/plain")
    async with site.gateway():
        task = shell_task('wc -c < "$POLAR_INSTRUCTION_FILE"; echo "${POLAR_INSTRUCTION-none}"', instruction=claim)
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
    assert ended.exit is not None
    assert ended.exit.output_tail == f"{len(text)}\nnone\n"


async def test_a_box_that_cannot_be_given_is_the_task_s_failure(desk: Desk, site: Site):
    task = shell_task("true")
    async with site.gateway():
        boot = await desk.boot()
        image = await desk.assign(boot, replace(task, runtime=replace(task.runtime, image="debian")))
        bridge = await desk.assign(boot, replace(task, runtime=replace(task.runtime, network="bridge")))
        for event in (image, bridge):
            ended = await desk.reached(event, Stage.ENDED)
            assert ended.exit is not None
            assert ended.exit.reason == "failed"
            assert ended.failure is not None
            assert (ended.failure.kind, ended.failure.retryable) == (FailureKind.TASK, False)


async def test_init_goes_on_filling_ready_while_all_run_slots_are_busy(desk: Desk, door: ModelDoor, site: Site):
    async with site.gateway(run_slots=1, ready_slots=2, init_slots=1):
        boot = await desk.boot()
        events = [await desk.assign(boot, shell_task(WAIT_AT_DOOR)) for _ in range(5)]
        await door.knocks(1)

        def settled(beat) -> bool:
            stages = sorted(one.stage for one in beat.held)
            return stages == ["READY", "READY", "REGISTERED", "REGISTERED", "RUNNING"]

        await desk.beat(settled)
        await desk.beat(settled)  # READY has a bound of its own: INIT now waits
        door.open.set()
        for event in events:
            await desk.reached(event, Stage.ENDED)
            assert desk.stages(event) == WHOLE


async def test_a_box_that_nobody_owns_is_destroyed(desk: Desk, site: Site):
    runtime = await asyncio.to_thread(create_runtime, "local", {"root": site.folder / "boxes"})
    mine = await runtime.create(BoxSpec(box_id=str(uuid.uuid4()), labels={LABEL: NODE}))
    other = await runtime.create(BoxSpec(box_id=str(uuid.uuid4()), labels={LABEL: "node-2"}))
    async with site.gateway():
        boot = await desk.boot()
        event = await desk.assign(boot, shell_task("true"))
        await desk.reached(event, Stage.ENDED)
        async with asyncio.timeout(30):
            while [one.box_id for one in await runtime.boxes(**{LABEL: NODE})] != [site.box(event)]:
                await desk.beat()
    assert await runtime.attach(mine.box_id) is None
    assert await runtime.attach(other.box_id) is not None
