"""Dead letters on a real broker: seen, tried again, dropped; two operators agree, and nothing ends twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar.bus import Bus, BusSettings, Out, Record
from polar.bus.errors import Fenced
from polar.cli.dead import head
from polar.cli.main import app
from polar.client import dead as letters
from polar.client.dead import RETRY, DeadRefused
from polar.evaluator.finisher import FinisherService
from polar.evaluator.settings import EvaluatorSettings
from polar.schemas import (
    CancelRequest,
    Cursor,
    DeadLetter,
    DeadResolved,
    EvaluatorSpec,
    Event,
    Outcome,
    RecordRef,
    SessionGraded,
    Stage,
    Status,
    TaskAccepted,
    Trajectory,
)
from polar.schemas.topics import TABLE, Service
from polar.service.settings import CommonSettings
from polar.submit.scheduler.settings import SchedulerSettings
from polar.submit.service import SubmitService
from polar.submit.settings import SubmitSettings
from tests.cli.conftest import Polar
from tests.cli.records import moved, trajectory

TASK = {"instruction": "do it", "agent": {"harness": "shell", "custom_shell": {"command": "true"}}}


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    """As an operator's."""
    async with Bus(bus_settings, Service.USER) as made:
        await made.prepare()
        yield made


@asynccontextmanager
async def speaking(bus: Bus, service: Service) -> AsyncIterator[Bus]:
    async with Bus(bus.settings, service) as made:
        yield made


async def everything(bus: Bus, topic: str) -> list[Record]:
    reader = await bus.reader([topic])
    try:
        return [record async for record in reader.to_end()]
    finally:
        await reader.close()


async def raw(bus: Bus, topic: str, value: bytes, key: bytes | None = b"k", **headers: bytes) -> Record:
    """Write bytes as a foreign client would; the record as Polar reads it."""
    producer = await bus.clients.producer()
    try:
        sent = await producer.send_and_wait(bus.settings.full(topic), value, key=key, headers=list(headers.items()))
    finally:
        await producer.stop()
    return await bus.lookup(RecordRef(topic=topic, partition=sent.partition, offset=sent.offset))


async def bury(bus: Bus, record: Record, error: str = "it broke", service: Service = Service.SCHEDULER) -> int:
    """The letter's number."""
    async with speaking(bus, service) as who:
        return (await who.dead_letter(record, error)).offset


async def written(bus: Bus, topic: str, event: Event, key: str = "k", service: Service = Service.SCHEDULER) -> Record:
    async with speaking(bus, service) as who:
        (ref,) = await who.send(Out(topic, key, event))
    return await bus.lookup(ref)


async def test_a_retry_is_the_same_bytes_in_the_same_partition_and_says_where_they_come_from(bus: Bus) -> None:
    record = await raw(bus, "tasks", json.dumps(TASK).encode(), b"me", traceparent=b"tp")
    number = await bury(bus, record)
    place = await letters.retry(bus, number, by="ada")
    again = await bus.lookup(place)
    assert place.partition == record.partition
    assert place.offset > record.offset
    assert (again.raw, again.key) == (record.raw, "me")
    assert again.headers["traceparent"] == b"tp"
    assert again.headers["polar-retry-of"] == f"tasks/{record.partition}/{record.offset}".encode()
    assert again.headers["polar-retry-letter"] == str(number).encode()
    found = await letters.find(bus, number)
    assert found.state == "retried"
    assert found.resolved is not None
    assert (found.resolved.published, found.resolved.by) == (place, "ada")
    assert await letters.count_open(bus) == 0


async def test_a_record_without_a_key_and_one_of_megabytes_come_back_whole(bus: Bus) -> None:
    long = {**TASK, "instruction": "x" * 2_000_000}
    record = await raw(bus, "tasks", json.dumps(long).encode(), None)
    place = await letters.retry(bus, await bury(bus, record))
    again = await bus.lookup(place)
    assert (again.key, again.raw, again.partition) == (None, record.raw, record.partition)


async def test_a_second_retry_needs_force(bus: Bus) -> None:
    number = await bury(bus, await raw(bus, "tasks", json.dumps(TASK).encode()))
    first = await letters.retry(bus, number)
    with pytest.raises(DeadRefused, match=f"was retried as tasks/{first.partition}/{first.offset} already; --force"):
        await letters.retry(bus, number)
    assert (await letters.retry(bus, number, force=True)).offset > first.offset
    assert len(await everything(bus, "tasks")) == 3


async def test_what_does_not_decode_is_refused_unless_forced(bus: Bus) -> None:
    number = await bury(bus, await raw(bus, "tasks", b'{"instruction": 1}'))
    with pytest.raises(DeadRefused, match=r"would only die again: .*instruction"):
        await letters.retry(bus, number)
    await letters.retry(bus, number, force=True)
    resolved = (await letters.find(bus, number)).resolved
    assert resolved is not None
    assert resolved.forced


async def test_what_was_dropped_stays_so_for_everybody(bus: Bus, bus_settings: BusSettings) -> None:
    number = await bury(bus, await raw(bus, "tasks", json.dumps(TASK).encode()))
    await letters.drop(bus, number, reason="a test", by="ada")
    async with Bus(bus_settings, Service.USER) as other:
        with pytest.raises(DeadRefused, match="was dropped by ada already"):
            await letters.drop(other, number)
        with pytest.raises(DeadRefused, match="was dropped by ada already; --force"):
            await letters.retry(other, number)
        await letters.retry(other, number, force=True)
        assert (await letters.find(other, number)).state == "retried"


async def test_of_two_operators_at_once_one_retries(bus: Bus, bus_settings: BusSettings) -> None:
    number = await bury(bus, await raw(bus, "tasks", json.dumps(TASK).encode()))
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(Bus(bus_settings, Service.USER)) for _ in range(3)]
        ended = await asyncio.gather(*(letters.retry(one, number) for one in others), return_exceptions=True)
    assert sum(isinstance(one, RecordRef) for one in ended) == 1, ended
    assert all(isinstance(one, RecordRef | DeadRefused | Fenced) for one in ended), ended
    assert len(await everything(bus, "tasks")) == 2
    assert sum(isinstance(one.value, DeadResolved) for one in await everything(bus, "dead")) == 1


async def test_letters_of_one_record_are_dealt_with_together_and_a_later_one_is_open(bus: Bus) -> None:
    record = await raw(bus, "tasks", json.dumps(TASK).encode())
    first, second = await bury(bus, record), await bury(bus, record)
    await letters.drop(bus, second)
    assert [one.state for one in (await letters.listed(bus)).letters] == ["dropped", "dropped"]
    third = await bury(bus, record)
    assert {one.number for one in (await letters.listed(bus, open_only=True)).letters} == {third}
    assert await letters.count_open(bus) == 1
    assert (await letters.find(bus, first)).state == "dropped"


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_every_topic_says_what_a_retry_means(spec: Any) -> None:
    assert RETRY[spec.name].effect
    assert RETRY[spec.name].allowed == (spec.name in ("tasks", "stages", "graded"))


async def test_what_would_break_exactly_once_is_refused_also_by_force(bus: Bus) -> None:
    built = await written(bus, "built", trajectory(session_id="s"), service=Service.BUILDER)
    number = await bury(bus, built, service=Service.BUILDER)
    for force in (False, True):
        with pytest.raises(DeadRefused, match=r"records of `built` are not retried: .* by their place"):
            await letters.retry(bus, number, force=force)
    accepted = TaskAccepted(
        task_id="t", count=1, group_id="t", source=built.ref, answers=built.ref, at_ms=1, sessions=["s"]
    )
    number = await bury(bus, await written(bus, "stages", accepted))
    with pytest.raises(DeadRefused, match="a TaskAccepted is the scheduler's own decision"):
        await letters.retry(bus, number, force=True)
    assert len(await everything(bus, "stages")) == len(await everything(bus, "built")) == 1


async def test_a_report_is_retried(bus: Bus) -> None:
    number = await bury(bus, await written(bus, "stages", moved("s", Stage.RUNNING), key="s"))
    await letters.retry(bus, number)
    first, second = await everything(bus, "stages")
    assert (second.value, second.key) == (first.value, "s")


def graded(session: str, built: RecordRef) -> SessionGraded:
    return SessionGraded(
        session_id=session,
        attempt=1,
        task_id="t",
        group_id="t",
        outcome=Outcome(status=Status.COMPLETED),
        built=built,
        evaluator=EvaluatorSpec(),
        at_ms=1,
    )


async def test_a_grade_that_died_is_finished_by_its_retry_exactly_once(bus: Bus) -> None:
    built = await written(bus, "built", trajectory(session_id="s"), service=Service.BUILDER)
    record = await written(bus, "graded", graded("s", built.ref), key="s")
    number = await bury(bus, record, service=Service.FINISHER)
    async with speaking(bus, Service.FINISHER) as finisher:
        # as the finisher leaves it: its cursor is past the record, in the letter's transaction
        passed = Cursor(next=record.offset + 1, replay_from=record.offset + 1)
        key = f"finisher/graded/{record.partition}"
        await finisher.send(Out("cursors", key, passed, partition=record.partition))
        running = asyncio.create_task(FinisherService(finisher, EvaluatorSettings()).run())
        try:
            await letters.retry(bus, number)
            async with asyncio.timeout(60):
                while not await everything(bus, "results"):  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0.05)
            for force in (False, True):
                with pytest.raises(DeadRefused, match=r"was retried as .* already, and `graded` allows it once"):
                    await letters.retry(bus, number, force=force)
            other = await bury(bus, record, service=Service.FINISHER)
            with pytest.raises(DeadRefused, match="session s has its result and its trajectory already"):
                await letters.retry(bus, other, force=True)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    found = [one.value for one in await everything(bus, "trajectories")]
    assert [one.session_id for one in found if isinstance(one, Trajectory)] == ["s"]


def submit(bus: Bus, folder: Path, **settings: Any) -> SubmitService:
    common = CommonSettings(state_dir=folder / "state")
    quick = SchedulerSettings(tick_seconds=0.2, leader_silence=1.0)
    return SubmitService(common, bus.settings, SubmitSettings(port=0, shutdown_s=0.5, **settings), quick)


@asynccontextmanager
async def running(made: SubmitService) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(bus: Bus, topic: str, kind: type[Event], count: int = 1) -> list[Any]:
    async with asyncio.timeout(60):
        while True:
            found = [record.value for record in await everything(bus, topic) if isinstance(record.value, kind)]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


async def test_a_task_that_was_refused_is_accepted_once_the_limits_allow_it(bus: Bus, tmp_path: Path) -> None:
    async with running(submit(bus, tmp_path, max_samples=1)):
        await raw(bus, "tasks", json.dumps({**TASK, "task_id": "t1", "num_samples": 2}).encode(), b"t1")
        (letter,) = await until(bus, "dead", DeadLetter)
        assert "num_samples" in letter.error
    async with running(submit(bus, tmp_path)):
        (one,) = (await letters.listed(bus)).letters
        place = await letters.retry(bus, one.number)
        (accepted,) = await until(bus, "stages", TaskAccepted)
        assert (accepted.task_id, accepted.count, accepted.source) == ("t1", 2, place)
        # and once more, by force: it is answered, and no second time accepted
        again = await letters.retry(bus, one.number, force=True)
        _, repeat = await until(bus, "stages", TaskAccepted, 2)
        assert (repeat.answers, repeat.source, repeat.sessions) == (again, place, accepted.sessions)


# --- the command ---


async def command(polar: Polar, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(polar, "dead", *arguments)


async def test_the_list_shows_state_and_filters(bus: Bus, polar: Polar) -> None:
    nothing = await command(polar, "list")
    assert (nothing.returncode, nothing.stdout) == (1, "no dead letters\n")
    one = await bury(bus, await raw(bus, "tasks", b"{", b"me"), "not JSON\x1b[31m")
    two = await bury(bus, await written(bus, "stages", moved("s", Stage.RUNNING), key="s"))
    await letters.drop(bus, two)
    told = await command(polar, "list")
    assert told.returncode == 0, told.stderr
    header, first, second = told.stdout.splitlines()
    assert header.split() == ["id", "when", "origin", "key", "state", "error"]
    assert "tasks/" in first
    assert "open" in first
    assert "not JSON" in first
    assert "\x1b" not in first
    assert "dropped" in second

    async def ids(*more: str) -> list[int]:
        found = await command(polar, "list", "--json", *more)
        return [json.loads(line)["id"] for line in found.stdout.splitlines()]

    assert await ids("--since", "1h") == [one, two]
    assert await ids("--topic", "stages") == [two]
    assert await ids("--open") == [one]
    assert (await command(polar, "list", "--since", "2999-01-01T00:00")).returncode == 1
    status = await asyncio.to_thread(polar, "status")
    assert "1 dead letter: polar dead list --open" in status.stdout


async def test_lists_are_of_the_newest(bus: Bus) -> None:
    numbers = [await bury(bus, await raw(bus, "tasks", b"{", b"me")) for _ in range(3)]
    found = await letters.listed(bus, limit=2)
    assert ([one.number for one in found.letters], found.more) == (numbers[1:], 1)
    assert all(one.letter.value == b"" for one in found.letters)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--topic", "nonsense"],
        ["list", "--limit", "0"],
        ["show", "x"],
        ["show", "-1"],
        ["retry"],
        ["drop", "-1"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["dead", *arguments]).exit_code == 2


async def test_showing_one_that_decodes_and_some_that_do_not(bus: Bus, polar: Polar) -> None:
    fine = await bury(bus, await written(bus, "tasks", CancelRequest(task_id="t9"), service=Service.USER))
    text = await bury(bus, await raw(bus, "tasks", b"not \xc3\xa0 task"), "unreadable")
    binary = await bury(bus, await raw(bus, "completions", b"\xc1\x00" * 400), service=Service.BUILDER)
    shown = await command(polar, "show", str(fine))
    assert shown.returncode == 0, shown.stderr
    assert "CancelRequest, which decodes now" in shown.stdout
    assert '"t9"' in shown.stdout
    assert "not à task" in (await command(polar, "show", str(text))).stdout
    dump = (await command(polar, "show", str(binary))).stdout
    assert "does not decode" in dump
    assert "0000  c1 00 c1 00" in dump
    assert "288 bytes more" in dump
    assert "no retry" in dump
    document = json.loads((await command(polar, "show", str(fine), "--json")).stdout)
    assert (document["value"]["task_id"], document["state"]) == ("t9", "open")
    ended = await command(polar, "show", "99")
    assert ended.returncode == 1
    assert "there is no dead letter 99" in ended.stderr


async def test_retrying_and_dropping(bus: Bus, polar: Polar) -> None:
    good = await bury(bus, await raw(bus, "tasks", json.dumps(TASK).encode()))
    bad = await bury(bus, await raw(bus, "completions", b"\xc1"), service=Service.BUILDER)
    done = await command(polar, "retry", str(good))
    assert done.returncode == 0, done.stderr
    assert f"{good}: again as tasks/" in done.stdout
    again = await command(polar, "retry", str(good))
    assert again.returncode == 1
    assert "already; --force" in again.stderr
    refused = await command(polar, "retry", str(bad), "--force")
    assert refused.returncode == 1
    assert "polar rebuild --session" in " ".join(refused.stderr.split())
    dropped = await command(polar, "drop", str(bad), "--reason", "seen")
    assert (dropped.returncode, dropped.stdout) == (0, f"{bad}: dropped\n")
    assert "dropped at" in (await command(polar, "show", str(bad))).stdout
    assert (await command(polar, "list", "--open")).returncode == 1


def test_bytes_are_shown_as_text_or_in_hexadecimal() -> None:
    assert head("ä\tb\nc".encode()) == ["ä\tb", "c"]
    assert head(b"x" * 511 + "é".encode())[-1] == "… 1 bytes more"
    assert head(b"\x1b[31m") == ["0000  1b 5b 33 31 6d                                   .[31m"]
    assert head(b"") == []
