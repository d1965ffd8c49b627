"""The view's file: it goes on where it was, and is thrown away where it does not fit; the log is recognized."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.schemas import Stage
from polar.submit.entries import ViewLimits
from polar.submit.viewfile import ViewFile
from tests.submit.records import NAMES, accepted, message, ref, tick
from tests.submit.viewlog import Log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "view.sqlite")
    yield made
    made.file.close()


def reasons(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "thrown away" in line]


def test_a_file_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path / "v")
    log.whole_task("t")
    log.put(accepted("r"))
    log.put(tick(5), "nodes")
    log.file.close()
    again = ViewFile(tmp_path / "v", ViewLimits(), "test")
    assert again.next == {("stages", 0): 2, ("results", 0): 2, ("nodes", 0): 1}
    assert again.nodes.tick == tick(5)
    assert again.flight == {Stage.REGISTERED: 1}
    assert again.settled_tasks == 1
    again.close()
    assert reasons(capsys) == []


@pytest.mark.parametrize("how", ["garbage", "torn", "version", "tables", "identity", "row"])
def test_a_file_that_does_not_fit_is_thrown_away_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path = tmp_path / "v"
    log = Log(path)
    log.whole_task("t")
    log.put(tick(5), "nodes")
    log.file.close()
    if how == "garbage":
        path.write_bytes(b"nonsense" * 4_096)
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:5_000])
    else:
        db = sqlite3.connect(path)
        change = {
            "version": "PRAGMA user_version = 99",
            "tables": "DROP TABLE offsets",
            "identity": "UPDATE meta SET value = 'other' WHERE name = 'identity'",
            "row": "UPDATE nodes SET beat = x'c1'",
        }[how]
        db.execute(change)
        db.commit()
        db.close()
    again = ViewFile(path, ViewLimits(), "test")
    assert again.next == {}
    assert again.tasks == 0
    again.close()
    assert len(reasons(capsys)) == 1


def test_a_file_that_somebody_deleted_but_for_its_journal_is_made_anew(tmp_path: Path) -> None:
    log = Log(tmp_path / "v")
    log.whole_task("t")
    journal = (tmp_path / "v-wal").read_bytes()
    log.file.close()
    (tmp_path / "v").unlink()
    (tmp_path / "v-wal").write_bytes(journal)
    again = ViewFile(tmp_path / "v", ViewLimits(), "test")
    assert again.next == {}
    again.close()


def test_the_log_is_recognized(log: Log) -> None:
    for number in range(10):
        log.put(accepted(f"t{number}"))
    here = ("stages", 0)
    fits = log.file.misfit
    assert fits("c1", {here: 0}, {here: 10}) is None
    assert fits("c1", {here: 10}, {here: 12}) is None, "all of it has expired, and was read"
    assert "another cluster: c1, now c2" in str(fits("c2", {here: 0}, {here: 10}))
    assert "was made anew" in str(fits("c1", {here: 0}, {here: 9}))
    assert "were deleted before being read" in str(fits("c1", {here: 11}, {here: 20}))
    log.file.passed({here: 15})
    assert fits("c1", {here: 15}, {here: 15}) is None, "marks of transactions lay behind"


def test_a_topic_made_anew_and_filled_beyond_is_recognized_by_its_last_record(log: Log) -> None:
    for number in range(3):
        log.put(accepted(f"t{number}"))
    here = ("stages", 0)
    assert log.file.misfit("c", {here: 0}, {here: 50}) is None
    log.file.apply([message(accepted("t2"), ref(2)), message(accepted("t3"), ref(3))], NAMES)
    assert log.file.misfit("c", {here: 0}, {here: 50}) is None
    with pytest.raises(RuntimeError, match="offset 3 of partition 0 of `stages` is another record now"):
        log.file.apply([message(accepted("other"), ref(3)), message(accepted("t4"), ref(4))], NAMES)
    assert log.file.misfit("c", {here: 0}, {here: 50}) is None
    with pytest.raises(RuntimeError, match="made anew"):
        log.file.apply([message(accepted("t3"), ref(3), timestamp=2)], NAMES)
