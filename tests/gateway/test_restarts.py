"""What becomes of a node's attempts when its process is killed, stopped, doubled or split in two."""

from __future__ import annotations

import asyncio
import signal

import pytest

from polar.gateway.errors import NodeInUse
from polar.schemas import FailureKind, PrepareAction, SessionAssigned, Stage, encode
from tests.gateway.desk import NODE, WAIT_AT_DOOR, Desk, ModelDoor, Site, killed, shell_task

FOREVER = [PrepareAction(type="exec", command="sleep 1000")]
SLOTS = {"run_slots": 1, "init_slots": 1, "ready_slots": 5}


def endings(desk: Desk, event: SessionAssigned) -> int:
    """Different ENDED reports; one may come twice when its process died before it noted the acknowledgement."""
    return len({encode(one) for one in desk.of(event) if one.stage is Stage.ENDED})


def lost(desk: Desk, event: SessionAssigned) -> bool:
    said = desk.of(event)[-1]
    assert said.stage is Stage.ENDED
    assert said.exit is not None
    assert said.exit.reason == "lost"
    assert said.failure is not None
    return said.failure.kind is FailureKind.INFRA and said.failure.retryable


async def filled(desk: Desk, door: ModelDoor, boot: str) -> list[SessionAssigned]:
    """One attempt in each stage: RUNNING, READY, INITIALIZING, REGISTERED."""
    running = await desk.assign(boot, shell_task(WAIT_AT_DOOR))
    await door.knocks(1)
    ready = await desk.assign(
        boot, shell_task("cat kept", prepare=[PrepareAction(type="exec", command="echo 1 > kept")])
    )
    await desk.reached(ready, Stage.READY)
    preparing = await desk.assign(boot, shell_task("true", prepare=FOREVER))
    await desk.reached(preparing, Stage.INITIALIZING)
    waiting = await desk.assign(boot, shell_task("true"))
    await desk.beat(lambda beat: len(beat.held) == 4)
    return [running, ready, preparing, waiting]


async def test_after_a_kill_what_ran_is_lost_and_what_waited_goes_on(desk: Desk, door: ModelDoor, site: Site):
    async with site.process(**SLOTS) as process:
        boot = await desk.boot()
        running, ready, preparing, waiting = await filled(desk, door, boot)
        await killed(process)
    await site.until_running(running, False)  # an agent does not outlive its gateway
    await site.until_running(preparing, False)
    async with site.gateway(**SLOTS):
        for event in (running, ready, preparing, waiting):
            await desk.reached(event, Stage.ENDED)
        assert (await desk.boot()) == boot
        assert lost(desk, running)
        assert lost(desk, preparing)
        done = desk.of(ready)[-1]
        assert done.failure is None
        assert done.exit is not None
        assert done.exit.output_tail == "1\n"  # in the box as it was
        assert desk.stages(waiting) == [Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED]
        for event in (running, ready, preparing, waiting):
            assert endings(desk, event) == 1
            await desk.release(event)
        await desk.beat(lambda beat: beat.held == [])


async def test_assignments_and_releases_that_came_while_the_node_was_away_are_found(desk: Desk, site: Site):
    async with site.process() as process:
        boot = await desk.boot()
        first = await desk.assign(boot, shell_task("true"))
        await desk.reached(first, Stage.ENDED)
        await killed(process)
    await desk.release(first)
    second = await desk.assign(boot, shell_task("true"))
    async with site.gateway():
        ended = await desk.reached(second, Stage.ENDED)
        assert ended.failure is None
        await desk.beat(lambda beat: [one.session_id for one in beat.held] == [second.session_id])
        assert not site.box_folder(first).exists()
    assert endings(desk, first) == 1


async def test_a_drain_ends_what_runs_gives_back_what_waits_and_keeps_what_is_ready(
    desk: Desk, door: ModelDoor, site: Site
):
    async with site.process(**SLOTS) as process:
        boot = await desk.boot()
        running, ready, preparing, waiting = await filled(desk, door, boot)
        process.send_signal(signal.SIGTERM)
        await desk.beat(lambda beat: beat.draining)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    for event in (running, preparing, waiting):
        await desk.reached(event, Stage.ENDED)
        assert lost(desk, event)
    assert desk.stages(ready) == [Stage.INITIALIZING, Stage.READY]
    assert await site.processes(running) == []
    async with site.gateway(**SLOTS):
        ended = await desk.reached(ready, Stage.ENDED)
        assert ended.failure is None


async def test_a_drain_lets_an_agent_finish_within_its_grace(desk: Desk, door: ModelDoor, site: Site):
    async with site.gateway(drain_grace_s=30) as gateway:
        event = await desk.assign(await desk.boot(), shell_task(WAIT_AT_DOOR))
        await door.knocks(1)
        draining = asyncio.create_task(gateway.drain())
        await desk.beat(lambda beat: beat.draining)
        late = await desk.assign(event.boot, shell_task("true"))
        await desk.reached(late, Stage.ENDED)
        assert lost(desk, late)
        door.open.set()
        await draining
        ended = await desk.reached(event, Stage.ENDED)
        assert ended.failure is None


async def test_a_second_process_of_a_node_does_not_start(desk: Desk, site: Site):
    async with site.gateway():
        await desk.beat()
        with pytest.raises(NodeInUse, match=NODE):
            async with site.gateway() as second:
                await second.run()


async def test_two_processes_share_a_node(desk: Desk, door: ModelDoor, site: Site):
    async with site.gateway(stage="init", **SLOTS), site.process(stage="run", **SLOTS) as run:
        await desk.until(lambda: {"init", "run"} <= {beat.half for beat in desk.beats})
        halves = {beat.half: beat for beat in desk.beats}
        boot = halves["init"].boot_id
        assert halves["run"].boot_id == boot
        assert (halves["init"].capacity.run, halves["run"].capacity.init) == (0, 0)
        assert halves["run"].read_to == -1
        assert halves["init"].read_to >= 0
        assert halves["run"].runtime_api is not None

        running, ready, preparing, waiting = await filled(desk, door, boot)
        await desk.beat(lambda beat: beat.half == "run" and len(beat.held) == 4)

        await desk.revoke(running)  # read by one half, run by the other
        ended = await desk.reached(running, Stage.ENDED)
        assert ended.exit is not None
        assert ended.exit.reason == "revoked"
        assert await site.processes(running) == []
        assert (await desk.reached(ready, Stage.ENDED)).failure is None
        await desk.release(running)
        await desk.release(ready)
        await desk.revoke(preparing)
        await desk.reached(preparing, Stage.ENDED)
        assert (await desk.reached(waiting, Stage.ENDED)).failure is None

        # one half goes on without the other, and what is lost is only what ran in that one
        again = await desk.assign(boot, shell_task(WAIT_AT_DOOR))
        await door.knocks(2)
        await killed(run)
        await site.until_running(again, False)
        last = await desk.assign(boot, shell_task("true"))
        await desk.reached(last, Stage.READY)
        async with site.gateway(stage="run", **SLOTS):
            await desk.reached(again, Stage.ENDED)
            assert lost(desk, again)
            assert (await desk.reached(last, Stage.ENDED)).failure is None
            for event in (preparing, waiting, again, last):
                await desk.release(event)
            await desk.beat(lambda beat: beat.half == "run" and beat.held == [])


async def test_a_node_that_lost_its_books_has_a_new_boot_and_takes_nothing_of_the_old(desk: Desk, site: Site):
    async with site.gateway():
        boot = await desk.boot()
        old = await desk.assign(boot, shell_task("true"))
        await desk.reached(old, Stage.ENDED)
    for path in list(site.folder.glob("state.sqlite*")):
        path.unlink()
    async with site.gateway(reap_interval_s=0.2):
        beat = await desk.beat(lambda beat: beat.boot_id != boot)
        assert beat.held == []
        async with asyncio.timeout(30):
            while await asyncio.to_thread(site.box_folder(old).exists):
                await desk.beat()
        await desk.release(old)
        new = await desk.assign(beat.boot_id, shell_task("true"))
        assert (await desk.reached(new, Stage.ENDED)).failure is None
    assert endings(desk, old) == 1
