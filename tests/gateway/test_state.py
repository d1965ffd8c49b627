"""The books: what they keep over processes, what they forget on purpose, and who may have them."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from pathlib import Path

import pytest

from polar.gateway import machine
from polar.gateway.errors import NodeInUse
from polar.gateway.machine import Half, Row
from polar.gateway.state import Books, FileLock
from polar.schemas import AgentSpec, CustomShell, SessionAssigned, Stage, StageChanged, TaskRequest


def assignment(name: str = "a", boot: str = "b") -> SessionAssigned:
    task = TaskRequest(
        task_id="t", instruction="do", agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="true"))
    )
    return SessionAssigned(
        assignment_id=name,
        node="n",
        boot=boot,
        session_id=f"s-{name}",
        attempt=1,
        task_id="t",
        group_id="g",
        sample=0,
        task=task,
    )


class Ids:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self) -> str:
        return f"id-{next(self._numbers)}"


async def opened(path: Path, ids: Ids, machine_: str = "m1") -> Books:
    return await Books.open(path, new_id=ids, machine=machine_)


async def put(books: Books, name: str = "a") -> Row:
    event = assignment(name)
    row = machine.assigned(event, "local", 1_000)
    assert await books.assign(row, event)
    return row


async def test_a_step_and_its_reports_outlive_the_process(tmp_path: Path):
    ids = Ids()
    async with await opened(tmp_path / "state", ids) as books:
        boot = books.boot_id
        await put(books)
        await books.step("a", lambda row: machine.begin_init(row, 2))
        await books.set_read_to(17)
    async with await opened(tmp_path / "state", ids) as books:
        assert books.boot_id == boot
        assert await books.read_to() == 17
        (row,) = await books.rows()
        assert row.stage is Stage.INITIALIZING
        assert await books.event("a") == assignment()
        assert await books.pending(10) == []  # the process before may still live: its reports are its own
        await books.adopt()
        (pending,) = await books.pending(10)
        assert isinstance(pending.message.value, StageChanged)
        assert pending.message.value.stage is Stage.INITIALIZING
        await books.sent([pending.number])
        assert await books.pending(10) == []


async def test_an_assignment_is_taken_once(tmp_path: Path):
    async with await opened(tmp_path / "state", Ids()) as books:
        await put(books)
        assert not await books.assign(machine.assigned(assignment(), "local", 5_000), assignment())
        assert len(await books.rows()) == 1


async def test_a_reboot_of_the_machine_empties_the_books_under_a_new_boot_id(tmp_path: Path):
    ids = Ids()
    async with await opened(tmp_path / "state", ids) as books:
        boot = books.boot_id
        await put(books)
        await books.set_read_to(3)
    async with await opened(tmp_path / "state", ids, "m2") as books:
        assert books.boot_id != boot
        assert await books.rows() == []
        assert await books.read_to() is None


async def test_a_file_that_cannot_be_read_counts_as_lost_and_is_put_aside(tmp_path: Path):
    ids = Ids()
    async with await opened(tmp_path / "state", ids) as books:
        boot = books.boot_id
    (tmp_path / "state").write_bytes(b"no database at all" * 100)
    async with await opened(tmp_path / "state", ids) as books:
        assert books.boot_id != boot
        assert await books.rows() == []
    assert (tmp_path / "state.broken").exists()


async def test_only_the_owner_can_read_the_file(tmp_path: Path):
    async with await opened(tmp_path / "state", Ids()):
        assert (tmp_path / "state").stat().st_mode & 0o077 == 0


async def test_a_cancelled_caller_leaves_no_half_transaction(tmp_path: Path):
    async with await opened(tmp_path / "state", Ids()) as books:
        await put(books)
        task = asyncio.create_task(books.step("a", lambda row: machine.begin_init(row, 2)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (row,) = await books.rows()
        pending = await books.pending(10)
        assert (row.stage is Stage.INITIALIZING) == (len(pending) == 1)
        assert await books.step("a", lambda row: machine.revoke(row, "x", 3)) is not None


async def test_a_step_that_raises_writes_nothing(tmp_path: Path):
    def broken(row: Row) -> None:
        raise ValueError("no")

    async with await opened(tmp_path / "state", Ids()) as books:
        await put(books)
        with pytest.raises(ValueError, match="no"):
            await books.step("a", broken)
        assert (await books.rows())[0].stage is Stage.REGISTERED
        assert await books.pending(10) == []


async def test_two_halves_share_the_books_and_one_of_them_gets_each_step(tmp_path: Path):
    ids = Ids()
    async with (
        await opened(tmp_path / "state", ids) as init,
        await opened(tmp_path / "state", ids) as run,
    ):
        assert init.boot_id == run.boot_id
        names = [f"a{number}" for number in range(20)]
        for name in names:
            await put(init, name)
            await init.step(name, lambda row: machine.begin_init(row, 2))
            await init.step(name, lambda row: machine.box_ready(row, 3))
        starts = [run.step(name, lambda row: machine.begin_run(row, 4)) for name in names]
        revokes = [init.step(name, lambda row: machine.revoke(row, "no", 4)) for name in names]
        done = await asyncio.gather(*starts, *revokes)
        for started, revoked in zip(done[:20], done[20:], strict=True):
            if started is None:
                assert revoked is not None
                assert revoked.row.ended
            elif revoked is not None:
                assert revoked.row.stage is Stage.RUNNING
                assert revoked.row.revoked == "no"


async def test_reports_of_an_attempt_stay_in_order_when_the_other_half_goes_on_with_it(tmp_path: Path):
    ids = Ids()
    async with (
        await opened(tmp_path / "state", ids) as init,
        await opened(tmp_path / "state", ids) as run,
    ):
        await put(init)
        await init.step("a", lambda row: machine.begin_init(row, 2))
        await init.step("a", lambda row: machine.box_ready(row, 3))
        await run.step("a", lambda row: machine.begin_run(row, 4))
        assert await init.pending(10) == []
        values = [one.message.value for one in await run.pending(10)]
        stages = [one.stage for one in values if isinstance(one, StageChanged)]
        assert stages == [Stage.INITIALIZING, Stage.READY, Stage.RUNNING]


async def test_a_removed_row_leaves_its_reports(tmp_path: Path):
    async with await opened(tmp_path / "state", Ids()) as books:
        await put(books)
        await books.step("a", lambda row: machine.release(row, 3))
        await books.remove("a")
        assert await books.rows() == []
        assert len(await books.pending(10)) == 1
        assert await books.step("a", lambda row: machine.begin_init(row, 2)) is None


def test_a_half_of_a_node_is_one_process(tmp_path: Path):
    init = FileLock(tmp_path, Half.INIT, "n")
    run = FileLock(tmp_path, Half.RUN, "n")
    with pytest.raises(NodeInUse, match="init"):
        FileLock(tmp_path, Half.INIT, "n")
    init.close()
    with pytest.raises(NodeInUse, match="run"):
        FileLock(tmp_path, Half.ALL, "n")
    run.close()
    FileLock(tmp_path, Half.ALL, "n").close()


async def test_a_file_that_may_not_be_written_is_an_error_for_a_person(tmp_path: Path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(sqlite3.OperationalError):
        await opened(path, Ids())
