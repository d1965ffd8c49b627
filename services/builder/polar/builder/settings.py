"""Settings of the builder: POLAR_BUILDER_… in the environment, `builder:` in the file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from polar.service.settings import PolarSettings, section_config


class BuilderSettings(PolarSettings):
    section: ClassVar[str] = "builder"
    model_config = section_config("builder")

    memory_bytes: int = Field(
        256 * 1024 * 1024,
        ge=0,
        description="Captured calls of open sessions that are kept in memory; more goes to a cache file.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder of the cache file; unset: `builder` in the state folder. What is in it is on the log too.",
    )
    max_batch: int = Field(200, ge=1, description="Records per transaction at most.")
    allow: frozenset[str] = Field(
        frozenset(),
        description="Builders that are not built in and may be used: names of entry points of `polar.builders`, or "
        "module:Class.",
    )
    tokenizers: tuple[Path, ...] = Field(
        (),
        description="tokenizer.json files, or folders that hold one, that tasks may name by SHA-256 in "
        "builder.config.tokenizer.",
    )
    accept_loss: bool = Field(
        False,
        description="Go on where the log has already lost records that were not processed, instead of stopping; calls "
        "may then be missing from trajectories.",
    )
