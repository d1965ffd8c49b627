"""Submit's settings (`POLAR_SUBMIT_…`); what limits a task is checked here, by the scheduler and by nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from polar.schemas.topics import MAX_RECORD_BYTES
from polar.schemas.validation import Limits
from polar.service.settings import PolarSettings, section_config

from .entries import ViewLimits

MIB = 1024 * 1024

Names = Annotated[frozenset[str], NoDecode]
"""In the environment: separated by commas."""


class SubmitSettings(PolarSettings):
    section: ClassVar[str] = "submit"
    model_config = section_config("submit")

    host: str = Field("127.0.0.1", description="Address the HTTP API listens on; it asks for no password.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the HTTP API; 0: any free one.")
    scheduler: bool = Field(
        True, description="Run the scheduler and send callbacks here; false: an API and a view only, as many as wanted."
    )

    # what a task may ask for
    max_samples: int = Field(4096, ge=1, description="Most samples of one task.")
    max_group: int = Field(256, ge=1, description="Most sessions of one group.")
    max_timeout_s: float = Field(7 * 86_400.0, gt=0, description="Longest time a task may set for any budget.")
    max_attempts: int = Field(10, ge=1, description="Most attempts a task may ask for.")
    allow_networks: Names = Field(
        frozenset({"proxy-only", "none"}),
        description="Values of runtime.network that are permitted; others become proxy-only, with a warning.",
    )
    import_paths: Names = Field(
        frozenset(), description="`module:Class` of outside harnesses, builders and evaluators that tasks may name."
    )

    # requests
    max_body_bytes: int = Field(16 * MIB, ge=1024, description="Largest request body.")
    inline_instruction_bytes: int = Field(
        64 * 1024,
        ge=0,
        le=MAX_RECORD_BYTES // 2,
        description="A longer instruction goes into the blob store before the task is published.",
    )
    accept_timeout_s: float = Field(
        10.0, gt=0, description="How long a submit waits for the scheduler's answer before it says 503."
    )
    max_waiting: int = Field(1024, ge=1, description="Requests that may wait for an answer or an ending at once.")
    max_wait_s: float = Field(300.0, ge=0, description="Upper bound of ?wait= on a task.")
    shutdown_s: float = Field(5.0, ge=0, description="How long open requests may go on when the process stops.")

    # the view
    view_file: Path | None = Field(
        None,
        description="SQLite file of the view, a cache that may be deleted; a process that finds it taken uses the next "
        "number beside it. Unset: submit/view.sqlite in the state folder.",
    )
    max_tasks: int = Field(50_000, ge=1, description="Ended tasks kept in the view; the oldest ended one goes first.")
    max_sessions: int = Field(500_000, ge=1, description="Sessions of ended tasks kept in the view, all together.")
    keep_s: float = Field(
        14 * 86_400.0, gt=0, description="How long a task is kept in the view after it ended, by the scheduler's ticks."
    )
    max_view_bytes: int = Field(
        4 * 1024 * MIB, ge=4 * MIB, description="Largest view file; beyond it tasks go early, the oldest ended first."
    )
    max_answers: int = Field(1_024, ge=1, description="Acceptances and rejections kept for repeated questions.")
    dead_after_ticks: int = Field(
        15, ge=1, description="A node whose last beat is so many ticks of the scheduler old is shown as not alive."
    )
    batch_records: int = Field(500, ge=1, description="Records the view takes from the log at a time.")

    # GET /events
    events_kept: int = Field(10_000, ge=0, description="Stage changes kept for watchers that come back.")
    event_queue: int = Field(1_000, ge=1, description="Events that may wait for a watcher before it is cut off.")
    event_watchers: int = Field(100, ge=1, description="Watchers at once.")
    event_write_timeout_s: float = Field(
        10.0, gt=0, description="A watcher that takes no bytes for so long is cut off."
    )
    event_ping_s: float = Field(15.0, gt=0, description="Silence after which a watcher is sent a comment.")

    # callbacks
    callback_memory_s: float = Field(
        3_600.0, ge=0, description="Tasks that ended this long ago or less are reported after a restart, if still due."
    )
    callback_timeout_s: float = Field(30.0, gt=0, description="Time for one try to deliver a callback.")
    callback_attempts: int = Field(8, ge=1, description="Tries to deliver a callback.")
    callback_backoff_s: float = Field(1.0, gt=0, description="Wait before the second try; doubles, with jitter.")
    callback_backoff_max_s: float = Field(60.0, gt=0, description="Longest wait between two tries.")
    callback_concurrency: int = Field(8, ge=1, description="Callbacks being sent at once.")
    callback_open: int = Field(256, ge=1, description="Callbacks being sent or waiting for their next try.")
    callback_trajectories: bool = Field(
        False, description="Put the trajectories, with all tokens, into callbacks; their place on the log always is."
    )

    @field_validator("allow_networks", "import_paths", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [one.strip() for one in value.split(",") if one.strip()] if isinstance(value, str) else value

    def limits(self) -> Limits:
        return Limits(
            max_samples=self.max_samples,
            max_group=self.max_group,
            max_timeout_s=self.max_timeout_s,
            max_attempts=self.max_attempts,
            allow_networks=self.allow_networks,
            import_paths=self.import_paths,
        )

    def view_limits(self) -> ViewLimits:
        return ViewLimits(
            max_tasks=self.max_tasks,
            max_sessions=self.max_sessions,
            keep_ms=round(self.keep_s * 1000),
            max_bytes=self.max_view_bytes,
            max_answers=self.max_answers,
            dead_after_ticks=self.dead_after_ticks,
        )
