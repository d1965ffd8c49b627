"""How every other command finds what `polar up` runs, with nothing exported.

While `polar up` runs on a folder it holds the folder's lock, and `polar.yaml` there names its addresses. Commands use
that file as if POLAR_CONFIG named it. It counts only while `polar up` runs, and never against what is said explicitly:
POLAR_CONFIG, or a POLAR_KAFKA_BOOTSTRAP that names another log.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.service.settings import CONFIG_VARIABLE, read_config

from .folder import CONFIG, is_locked

STATE_VARIABLE = "POLAR_STATE_DIR"
BOOTSTRAP_VARIABLE = "POLAR_KAFKA_BOOTSTRAP"
DEFAULT_DIR = ".polar"


@dataclass(frozen=True)
class Running:
    """A `polar up` that runs now."""

    directory: Path
    config: dict[str, Any]

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG

    @property
    def bootstrap(self) -> str:
        return str(self.config.get("kafka", {}).get("bootstrap", ""))


def find_running(directory: Path | str = DEFAULT_DIR) -> Running | None:
    """The `polar up` that runs on a folder, or None."""
    path = Path(directory).absolute()
    if not (path / CONFIG).is_file() or not is_locked(path):
        return None
    return Running(path, read_config(path / CONFIG))


def use_running(environ: MutableMapping[str, str]) -> Running | None:
    """Let this process's settings be those of the `polar up` in the working folder, where one runs and is meant."""
    if environ.get(CONFIG_VARIABLE):
        return None
    running = find_running(environ.get(STATE_VARIABLE) or DEFAULT_DIR)
    if running is None:
        return None
    named = environ.get(BOOTSTRAP_VARIABLE)
    if named and named != running.bootstrap:
        return None
    environ[CONFIG_VARIABLE] = str(running.config_path)
    return running
