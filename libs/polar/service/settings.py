"""Configuration of a process, from arguments, environment and one YAML file.

What wins, first to last: arguments, `POLAR_<SECTION>_<FIELD>` in the environment, `<section>: {<field>: …}` in the
YAML file that POLAR_CONFIG names, defaults. A name in the file that no setting has is an error with the nearest name.
Settings are plain values that are passed on; nothing here is global.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

CONFIG_VARIABLE = "POLAR_CONFIG"
SHORTEST_SECRET = 32
"""Characters; what HS256 wants (RFC 7518, section 3.2)."""


class ConfigWrong(ValueError):
    """The YAML file cannot be used; the message says where and why."""


class PolarSettings(BaseSettings):
    """Base of every section of settings.

    class GatewaySettings(PolarSettings):
        section: ClassVar[str] = "gateway"
        model_config = section_config("gateway")
        run_slots: int = Field(4, description="…")
    """

    section: ClassVar[str] = ""
    """Its name in the file and, in capitals, in the environment; empty: the top level of both."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=cls._from_file()))

    @classmethod
    def _from_file(cls) -> dict[str, Any]:
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            return {}
        whole = read_config(Path(path))
        if not cls.section:
            # the top level also holds the sections, which are mappings; a setting of the top level never is one
            found = {name: value for name, value in whole.items() if not isinstance(value, Mapping)}
        else:
            found = whole.get(cls.section) or {}
            if not isinstance(found, Mapping):
                raise ConfigWrong(f"{path}: `{cls.section}` is not a mapping of settings")
        unknown = [name for name in found if name not in cls.model_fields]
        if unknown:
            where = f"{cls.section}." if cls.section else ""
            near = difflib.get_close_matches(str(unknown[0]), list(cls.model_fields), n=1)
            hint = f"; did you mean `{where}{near[0]}`?" if near else ""
            raise ConfigWrong(f"{path}: `{where}{unknown[0]}` is no setting{hint}")
        return dict(found)


def section_config(section: str) -> SettingsConfigDict:
    """The `model_config` of the settings of `section`; empty: of the top level."""
    prefix = f"POLAR_{section.upper()}_" if section else "POLAR_"
    return SettingsConfigDict(
        env_prefix=prefix, env_nested_delimiter="__", extra="ignore", frozen=True, validate_default=True
    )


def read_config(path: Path) -> dict[str, Any]:
    """The YAML file as a dictionary.

    Raises:
        ConfigWrong: missing, unreadable, not YAML, or not a mapping.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigWrong(f"cannot read {path}, which {CONFIG_VARIABLE} names: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigWrong(f"{path} is not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigWrong(f"{path} is not a mapping of sections")
    return found


class CommonSettings(PolarSettings):
    """What every process has."""

    model_config = section_config("")

    state_dir: Path = Field(Path(".polar"), description="Folder for local state, blobs and the embedded broker's data.")
    token_secret: SecretStr | None = Field(
        None,
        description="Secret that signs session tokens and box keys, 32 characters or more; the same for every process. "
        "Unset: made once in the state folder.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: coloured lines on a terminal, JSON elsewhere."
    )
    shutdown_grace_s: float = Field(
        20.0, ge=0, description="Seconds that services get to finish what they have after the first SIGTERM or SIGINT."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port for /health, /ready and /metrics of this process; unset: none."
    )
    metrics_host: str = Field("127.0.0.1", description="Address that metrics_port listens on.")

    @field_validator("token_secret")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < SHORTEST_SECRET:
            raise ValueError(f"must have {SHORTEST_SECRET} characters or more")
        return value

    def secret(self) -> str:
        """The secret that signs tokens; makes it on first use where none is set. Reads a file: call it at start."""
        if self.token_secret is not None:
            return self.token_secret.get_secret_value()
        return made_once(self.state_dir / "token-secret")


def made_once(path: Path) -> str:
    """The secret in `path`, made with mode 0600 where it is missing; processes that race agree on one.

    Raises:
        ConfigWrong: the file holds no secret.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(48))
                file.flush()
                os.fsync(file.fileno())
            # unlike a rename, a link fails where another process was first: then its secret is the one
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    text = path.read_text().strip()
    if len(text) < SHORTEST_SECRET:
        raise ConfigWrong(
            f"{path} holds no secret of {SHORTEST_SECRET} characters or more; remove it to make a new one"
        )
    return text


def describe(*parts: PolarSettings) -> str:
    """The resolved configuration as YAML, in the shape of the file, secrets masked."""
    found: dict[str, Any] = {}
    for part in parts:
        values = part.model_dump(mode="json")  # SecretStr becomes asterisks
        if part.section:
            found[part.section] = values
        else:
            found |= values
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def unknown_variables(environ: Mapping[str, str], *kinds: type[PolarSettings]) -> list[str]:
    """Variables that look like a setting of `kinds` and are none, each with the nearest name; for a warning at start.

    No error, since Kubernetes puts variables named after its services (POLAR_PROXY_PORT_8080_TCP) into every pod.
    """
    known = {f"{prefix_of(kind)}{name.upper()}" for kind in kinds for name in kind.model_fields}
    known.add(CONFIG_VARIABLE)
    prefixes = tuple(prefix_of(kind) for kind in kinds if kind.section)
    found = []
    for name in sorted(environ):
        if name.startswith(prefixes) and name.split("__")[0] not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            found.append(f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else ""))
        elif name.startswith("POLAR_") and name not in known:
            # of another section, of a program of its own, or misspelt: only the last has a near name
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
            if near:
                found.append(f"{name} is no setting; did you mean {near[0]}?")
    return found


def prefix_of(kind: type[PolarSettings]) -> str:
    """The prefix of the section's environment variables."""
    return str(kind.model_config.get("env_prefix", ""))
