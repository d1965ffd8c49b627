"""Where a setting comes from, and what is said about a wrong one."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from blockbuster import BlockingError
from pydantic import Field, SecretStr, ValidationError

from polar.bus import BusSettings
from polar.service.settings import (
    CommonSettings,
    ConfigWrong,
    PolarSettings,
    describe,
    made_once,
    section_config,
    unknown_variables,
)


class DemoSettings(PolarSettings):
    section: ClassVar[str] = "demo"
    model_config = section_config("demo")

    slots: int = Field(4, ge=1, description="Slots.")
    names: list[str] = Field(["a"], description="Names.")
    key: SecretStr | None = Field(None, description="A secret.")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "polar.yaml"
    monkeypatch.setenv("POLAR_CONFIG", str(path))
    return path


def test_arguments_win_over_environment_over_file_over_defaults(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("demo: {slots: 7, names: [b, c]}\nlog_level: debug\n")
    assert (DemoSettings().slots, DemoSettings().names) == (7, ["b", "c"])
    monkeypatch.setenv("POLAR_DEMO_SLOTS", "9")
    assert DemoSettings().slots == 9
    assert DemoSettings(slots=11).slots == 11
    assert CommonSettings().log_level == "debug"
    config.write_text("")
    monkeypatch.delenv("POLAR_DEMO_SLOTS")
    assert DemoSettings().slots == 4


def test_lists_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_DEMO_NAMES", '["x", "y"]')
    assert DemoSettings().names == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("demo: {slot: 7}", "`demo.slot` is no setting; did you mean `demo.slots`?"),
        ("demo: 7", "`demo` is not a mapping"),
        ("- demo", "is not a mapping of sections"),
        ("demo: {", "is not YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(config: Path, text: str, words: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigWrong) as caught:
        DemoSettings()
    assert words in str(caught.value)


def test_a_missing_file_is_an_error(config: Path) -> None:
    with pytest.raises(ConfigWrong, match="which POLAR_CONFIG names"):
        DemoSettings()


def test_a_misspelt_name_at_the_top_level_is_an_error_but_sections_are_not(config: Path) -> None:
    config.write_text("demo: {slots: 2}\nlog_levle: info\n")
    with pytest.raises(ConfigWrong, match="did you mean `log_level`"):
        CommonSettings()


def test_a_value_out_of_range_names_the_field() -> None:
    with pytest.raises(ValidationError, match="slots"):
        DemoSettings(slots=0)


def test_settings_are_fixed_once_made() -> None:
    with pytest.raises(ValidationError):
        DemoSettings().slots = 3


def test_the_resolved_configuration_is_told_without_secrets() -> None:
    told = describe(CommonSettings(token_secret=SecretStr("s" * 40)), DemoSettings(key=SecretStr("hidden")))
    assert "sss" not in told
    assert "hidden" not in told
    found = yaml.safe_load(told)
    assert found["demo"]["slots"] == 4
    assert found["log_level"] == "info"


def test_a_misspelt_variable_is_told_with_the_nearest_name() -> None:
    environ = {"POLAR_DEMO_SLOT": "1", "POLAR_DEMO_SLOTS": "1", "POLAR_CONFIG": "x", "HOME": "/"}
    assert unknown_variables(environ, CommonSettings, DemoSettings) == [
        "POLAR_DEMO_SLOT is no setting; did you mean POLAR_DEMO_SLOTS?"
    ]


def test_every_setting_has_a_description() -> None:
    for kind in (CommonSettings, BusSettings):
        assert all(field.description for field in kind.model_fields.values()), kind


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValidationError, match="32 characters"):
        CommonSettings(token_secret=SecretStr("short"))


def test_a_secret_is_made_once_for_all_processes(tmp_path: Path) -> None:
    common = CommonSettings(state_dir=tmp_path / "state")
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: common.secret(), range(32)))
    assert len(found) == 1
    path = tmp_path / "state" / "token-secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path], "no drafts are left"
    assert CommonSettings(state_dir=tmp_path / "state").secret() in found


async def test_the_guard_of_this_suite_finds_code_that_blocks_the_loop(tmp_path: Path) -> None:
    with pytest.raises(BlockingError):
        CommonSettings(state_dir=tmp_path).secret()


def test_a_damaged_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token-secret").write_text("x")
    with pytest.raises(ConfigWrong, match="holds no secret"):
        made_once(tmp_path / "token-secret")


def test_sasl_without_credentials_is_refused() -> None:
    with pytest.raises(ValidationError, match="sasl_username"):
        BusSettings(security_protocol="SASL_SSL")


def test_blobs_are_below_the_state_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_STATE_DIR", str(tmp_path))
    assert BusSettings().blob_url == (tmp_path / "blobs").as_uri()
