"""`polar up`'s parts: the folder, the plan, the logs, how commands find it, and the supervisor on real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from polar.cli.up import CannotUp, Wish, find_running, use_running
from polar.cli.up.folder import Folder, is_locked
from polar.cli.up.logs import ChildLog, Line, Slower, read_line
from polar.cli.up.plan import USUAL, base_url, make_plan, merged
from polar.cli.up.supervisor import Program, Supervisor, Watcher
from polar.cli.up.up import Up

NOTHING: dict[str, str] = {}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in os.environ if one.startswith("POLAR_")]:
        monkeypatch.delenv(name)


# --- the folder ---


def test_a_new_folder_is_made_marked_and_explained(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "a" / "state")
    assert json.loads((folder.path / "up.json").read_text())["format"] == 1
    assert "delete the folder" in (folder.path / "README.txt").read_text()
    folder.close()


def test_a_second_one_on_the_same_folder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(CannotUp, match=f"already running on {tmp_path} .process {os.getpid()}."):
        Folder.open(tmp_path)
    folder.close()
    assert not is_locked(tmp_path)
    Folder.open(tmp_path).close()


@pytest.mark.parametrize("mark", ['{"format": 2, "polar": "9.9"}', "{}", "not json", "[1]"])
def test_a_folder_of_another_version_is_refused_and_left_alone(tmp_path: Path, mark: str) -> None:
    (tmp_path / "up.json").write_text(mark)
    with pytest.raises(CannotUp, match="of another version"):
        Folder.open(tmp_path)
    assert (tmp_path / "up.json").read_text() == mark
    assert not is_locked(tmp_path)


def test_somebody_elses_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CannotUp, match=r"thesis.tex, which is not Polar's"):
        Folder.open(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_state_folder_of_single_services_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "token-secret").write_text("s" * 40)
    (tmp_path / "gateway").mkdir()
    Folder.open(tmp_path).close()


def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CannotUp, match="too few for a log"):
        Folder.open(tmp_path, least_free=1 << 60)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotUp, match="cannot write to"):
        Folder.open(tmp_path / "file" / "state")


def test_ports_stay_the_same_and_move_only_where_they_are_taken(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    first = folder.port("proxy", None, None)
    folder.save()
    folder.close()
    folder = Folder.open(tmp_path)
    assert folder.port("proxy", None, 1) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        moved = folder.port("proxy", None, None)
        assert moved != first
        with pytest.raises(CannotUp, match=f"port {first} for proxy is in use"):
            folder.port("proxy", first, None)
    folder.close()


# --- the plan ---


def test_everything_is_embedded_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    plan = make_plan(Wish(tmp_path), folder, NOTHING)
    assert [one.name for one in plan.programs] == [
        "kafka",
        "model",
        "submit",
        "proxy",
        "builder",
        "evaluator",
        "gateway",
    ]
    assert plan.config["kafka"]["bootstrap"] == plan.kafka == f"127.0.0.1:{folder.mark.ports['kafka']}"
    assert plan.config["proxy"]["engine_urls"] == plan.engines
    assert plan.bus_settings().blob_url == (tmp_path / "blobs").as_uri()
    assert oct((tmp_path / "polar.yaml").stat().st_mode)[-3:] == "600"
    folder.close()


def test_a_demo_leaves_the_usual_ports_to_polar_up(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    make_plan(Wish(tmp_path, kind="demo"), folder, NOTHING)
    assert not set(folder.mark.ports.values()) & set(USUAL.values())
    folder.close()


def test_other_addresses_replace_the_embedded_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_KAFKA_BOOTSTRAP", "kafka-1:9092,kafka-2:9092")
    monkeypatch.setenv("POLAR_KAFKA_TOPIC_PREFIX", "mine.")
    folder = Folder.open(tmp_path)
    wish = Wish(tmp_path, model_url="gpu:8000, http://gpu2:8000/v1", model="big", without=frozenset({"gateway"}))
    plan = make_plan(wish, folder, dict(os.environ))
    assert [one.name for one in plan.programs] == ["submit", "proxy", "builder", "evaluator"]
    assert plan.engines == ["http://gpu:8000/v1", "http://gpu2:8000/v1"]
    kafka = plan.config["kafka"]
    assert (kafka["bootstrap"], kafka["topic_prefix"]) == ("kafka-1:9092,kafka-2:9092", "mine.")
    assert "partitions" not in kafka  # its topics may exist already
    assert plan.config["proxy"]["model"] == "big"
    folder.close()


def test_several_engines_with_models_of_their_own_replace_the_embedded_one(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    said = [
        {"model": "a", "urls": ["gpu:8000"]},
        {"model": "b", "urls": "http://x:1/v1,http://y:1/v1", "kind": "sglang"},
    ]
    environ = {"POLAR_PROXY_ENGINES": json.dumps(said)}
    plan = make_plan(Wish(tmp_path), folder, environ)
    assert "model" not in [one.name for one in plan.programs]
    assert plan.engines == ["http://gpu:8000/v1", "http://x:1/v1", "http://y:1/v1"]
    assert plan.config["proxy"]["engines"][1] == {"model": "b", "urls": plan.engines[1:], "kind": "sglang"}
    assert "POLAR_PROXY_ENGINES" not in plan.programs[-1].env
    # the flag is nearer to the user than the environment
    plan = make_plan(Wish(tmp_path, model_url="z:1"), folder, environ)
    assert (plan.engines, plan.config["proxy"]["engines"]) == (["http://z:1/v1"], [])
    for wrong in ("{", '[{"url": "http://x/v1"}]', '["http://x/v1"]'):
        with pytest.raises(CannotUp, match=r"ENGINES|engines"):
            make_plan(Wish(tmp_path), folder, {"POLAR_PROXY_ENGINES": wrong})
    folder.close()


def test_the_users_own_settings_count_where_up_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("gateway: {run_slots: 3}\nkafka: {partitions: 7}\nsubmit: {port: 0}\n")
    monkeypatch.setenv("POLAR_CONFIG", str(own))
    monkeypatch.setenv("POLAR_PROXY_PORT", str(port := _free()))
    folder = Folder.open(tmp_path / "state")
    plan = make_plan(Wish(folder.path), folder, dict(os.environ))
    assert plan.config["gateway"]["run_slots"] == 3
    assert plan.config["kafka"]["partitions"] == 7
    assert plan.config["proxy"]["port"] == port
    env = plan.programs[-1].env
    assert env["POLAR_CONFIG"] == str(folder.path / "polar.yaml")
    assert "POLAR_PROXY_PORT" not in env
    folder.close()


def test_unknown_services_and_addresses_are_refused_by_name(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    with pytest.raises(CannotUp, match="'gatway' is no service"):
        make_plan(Wish(tmp_path, without=frozenset({"gatway"})), folder, NOTHING)
    with pytest.raises(CannotUp, match="is no URL of an engine"):
        make_plan(Wish(tmp_path, model_url="ftp://x"), folder, NOTHING)
    folder.close()


def test_sections_are_merged_setting_by_setting() -> None:
    assert merged({"a": {"x": 1, "y": 1}, "b": 1}, {"a": {"y": 2}}, {"b": {"z": 3}}) == {
        "a": {"x": 1, "y": 2},
        "b": {"z": 3},
    }


def test_base_urls_as_people_type_them() -> None:
    assert base_url("gpu:8000") == "http://gpu:8000/v1"
    assert base_url("https://x/v1/") == "https://x/v1"
    assert base_url(" http://x/prefix ") == "http://x/prefix/v1"


# --- how commands find it ---


def test_a_running_one_is_found_and_what_is_said_explicitly_wins(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    folder.write_config({"kafka": {"bootstrap": "127.0.0.1:1"}})
    here = {"POLAR_STATE_DIR": str(tmp_path)}
    env = dict(here)
    running = use_running(env)
    assert running is not None
    assert env["POLAR_CONFIG"] == str(tmp_path / "polar.yaml")
    assert use_running({**here, "POLAR_CONFIG": "other.yaml"}) is None
    assert use_running({**here, "POLAR_KAFKA_BOOTSTRAP": "elsewhere:9092"}) is None
    assert use_running({**here, "POLAR_KAFKA_BOOTSTRAP": "127.0.0.1:1"}) is not None
    folder.close()
    assert find_running(tmp_path) is None  # what has ended, also by SIGKILL, is not found
    env = dict(here)
    assert use_running(env) is None
    assert env == here


# --- logs ---


def test_lines_of_the_services_and_of_the_standard_library_are_understood() -> None:
    assert read_line('{"event": "ready", "level": "warning", "port": 1, "timestamp": "t"}') == Line(
        "warning", "ready port=1"
    )
    assert read_line("2026-01-01 10:00:00,123 ERROR polar.broker disk full") == Line("error", "disk full")
    assert read_line("{broken") == Line("info", "{broken")
    assert read_line("ready http://x") == Line("info", "ready http://x")


async def test_a_childs_output_is_kept_bounded_and_its_last_error_is_why(tmp_path: Path) -> None:
    seen: list[Line] = []
    log = ChildLog(tmp_path / "x.log", seen.append, limit=1000)
    stream = asyncio.StreamReader()
    stream.feed_data(b'{"event": "no disk", "level": "error"}\n' + b"filler\n" * 400 + b"last, no newline")
    stream.feed_eof()
    await log.pump(stream)
    assert seen == [Line("error", "no disk")]
    assert log.why() == "last, no newline"
    assert log.why(errors_only=True) == ""
    assert (tmp_path / "x.log").stat().st_size <= 1000
    assert (tmp_path / "x.log.1").stat().st_size <= 1000
    log.close()


def test_a_flood_of_warnings_is_counted_instead_of_shown() -> None:
    now = 0.0
    slower = Slower(lambda: now, burst=2, per_s=10.0)
    assert [slower.admit() for _ in range(4)] == [(True, 0), (True, 0), (False, 0), (False, 0)]
    now = 11.0
    assert slower.admit() == (True, 2)


# --- the supervisor ---


class Told(Watcher):
    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def ready(self, name: str, after_s: float) -> None:
        self.events.append(("ready", name))

    def ended(self, name: str, how: str, why: str, pause_s: float) -> None:
        self.events.append(("ended", name, how))


def program(name: str, code: str, tmp_path: Path, **fields: object) -> Program:
    """A Python program that is ready once it has written the file of its name."""
    ready = tmp_path / f"{name}.ready"

    async def is_ready() -> bool:
        return ready.exists()

    full = f"import time, pathlib, sys, os, signal\nready = pathlib.Path({str(ready)!r})\n{code}"
    return Program(
        name=name,
        argv=[sys.executable, "-c", full],
        env=dict(os.environ),
        ready=is_ready,
        before=partial(ready.unlink, missing_ok=True),
        **{"stop": 0, "ready_s": 30.0, **fields},  # type: ignore[arg-type]
    )


STEADY = "ready.write_text('')\nwhile True: time.sleep(60)"


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_programs_start_after_what_they_need_and_stop_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    note = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(order)!r}, 'a').write(NAME), sys.exit(0)))\n"
    told = Told()
    supervisor = Supervisor(
        [
            program("late", "NAME='late '\n" + note + STEADY, tmp_path, after=("early",), stop=0),
            program("early", "NAME='early '\n" + note + "time.sleep(0.3)\n" + STEADY, tmp_path, stop=1),
        ],
        tmp_path,
        told,
    )
    await supervisor.start()
    assert told.events == [("ready", "early"), ("ready", "late")]
    pids = supervisor.pids()
    assert await supervisor.stop() == []
    assert order.read_text() == "late early "
    assert not any(_alive(pid) for pid in pids.values())


async def test_what_dies_is_started_again_and_said(tmp_path: Path) -> None:
    told = Told()
    supervisor = Supervisor([program("one", STEADY, tmp_path)], tmp_path, told)
    await supervisor.start()
    first = supervisor.pids()["one"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: told.events.count(("ready", "one")) == 2, "started again")
    assert ("ended", "one", "killed by SIGKILL") in told.events
    assert supervisor.pids()["one"] != first
    assert supervisor.restarts() == {"one": 1}
    await supervisor.stop()


async def test_a_program_that_never_got_ready_fails_the_start_with_its_own_words(tmp_path: Path) -> None:
    supervisor = Supervisor([program("one", "sys.exit('no weights here')", tmp_path)], tmp_path, Told())
    with pytest.raises(CannotUp, match=r"one could not start \(exit code 1\): no weights here"):
        await supervisor.start()
    await supervisor.kill()


async def test_a_program_that_does_not_get_ready_in_time_fails_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor([program("one", "time.sleep(60)", tmp_path, ready_s=0.3)], tmp_path, Told())
    with pytest.raises(CannotUp, match="one is not ready after"):
        await supervisor.start()
    await supervisor.kill()
    assert supervisor.pids() == {}


async def test_what_ignores_sigterm_is_killed_in_time_and_named(tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STEADY
    supervisor = Supervisor([program("one", stubborn, tmp_path, stop_s=0.3)], tmp_path, Told())
    await supervisor.start()
    assert await supervisor.stop() == ["one"]
    assert supervisor.pids() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_no_child_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from polar.cli.up.supervisor import Program, Supervisor, Watcher\n"
        "async def yes(): return True\n"
        "async def main():\n"
        "    argv = [sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']\n"
        "    one = Program(name='one', argv=argv, env=dict(os.environ), ready=yes, stop=0)\n"
        "    supervisor = Supervisor([one], Path(sys.argv[1]), Watcher())\n"
        "    await supervisor.start()\n"
        "    while not supervisor.pids(): await asyncio.sleep(0.01)\n"
        "    print(supervisor.pids()['one'], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert _alive(child)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while _alive(child):
            assert time.monotonic() < deadline, "the child still runs"
            time.sleep(0.02)


async def test_an_unreachable_kafka_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_KAFKA_BOOTSTRAP", f"127.0.0.1:{_free()}")
    with pytest.raises(CannotUp, match="cannot reach Kafka at"):
        await Up(Wish(tmp_path / "state"), lambda _: None).__aenter__()
    assert not is_locked(tmp_path / "state")


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
