"""The scheduler's settings (`POLAR_SCHEDULER_…`), all with defaults that fit one machine and a cluster alike."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polar.service.settings import PolarSettings, section_config


class SchedulerSettings(PolarSettings):
    section: ClassVar[str] = "scheduler"
    model_config = section_config("scheduler")

    tick_seconds: float = Field(1.0, gt=0, description="How often the leader writes its tick.")
    node_silence: int = Field(15, ge=2, description="A node is dead after so many ticks without a beat.")
    leader_silence: float = Field(4.0, gt=0, description="Seconds without a tick after which a standby takes over.")
    lost_after: int = Field(
        5, ge=1, description="Ticks for which a node's books must lack an assignment that it has read until it is lost."
    )
    final_grace: int = Field(
        30,
        ge=1,
        description="Ticks from a session's close until nothing of it is waited for; longer than a broker restart.",
    )
    retry_backoff: float = Field(
        2.0, ge=0, description="Seconds before a second attempt; doubles for each further one."
    )
    retry_backoff_max: float = Field(60.0, ge=0, description="Upper bound of the wait before an attempt, in seconds.")
    grade_attempts: int = Field(3, ge=1, description="Tries to grade a session; never two in the same box.")
    grade_margin: float = Field(
        30.0, ge=0, description="Seconds beyond evaluation_timeout until a silent grade is given up."
    )
    overdue_margin: float = Field(
        600.0,
        gt=0,
        description="Seconds beyond timeout_seconds after which an attempt that a living gateway still calls running "
        "is given up.",
    )
    kept_boxes: int = Field(
        256, ge=1, description="Boxes a gateway may keep for grades to come before it is given no further session."
    )
    node_memory: int = Field(3_600, ge=60, description="Ticks after which a node that is gone is forgotten.")
    max_grade_bytes: int = Field(
        256 * 1024, ge=4096, description="Largest grade with its report; a larger one is a failure of the grader."
    )
    box_patience: int = Field(
        60,
        ge=0,
        description="Ticks for which a built session waits for a gateway that fell silent with the box that its grade "
        "needs.",
    )
    release_repeat: int = Field(
        10, ge=1, description="Ticks until a release that a node has not acted on is sent again."
    )
    task_memory: float = Field(
        7 * 86_400.0, gt=0, description="Seconds for which a finished task's id is remembered and a repeat answered."
    )
    box_key_life: float = Field(
        3_600.0, gt=0, description="Seconds beyond evaluation_timeout that a grader's box key is good."
    )
    grade_queue_ttl: float = Field(
        3_600.0,
        gt=0,
        description="Seconds for which a built session waits while no grader that lives offers its evaluator; after "
        "that it is finished without a reward (`not_available`). Graders that are only busy are waited for.",
    )
    max_open_sessions: int = Field(
        100_000,
        ge=1,
        description="Accepted sessions that have not finished, at most; a task beyond it is answered with `busy`, and "
        "may be sent again as it is.",
    )
    watchdog_s: float = Field(
        60.0, gt=0, description="A leader that makes no step for so many seconds starts anew from the log."
    )
    watchdog_restarts: int = Field(
        3, ge=0, description="How often in a row it does so before the process ends with an error."
    )
    accept_loss: bool = Field(
        False,
        description="Go on where the log has already lost tasks or reports that no leader had read, instead of "
        "stopping with their offsets; tasks are then unanswered, and sessions end by their budgets.",
    )
    max_batch: int = Field(2_000, ge=1, description="Records read before their decisions are committed.")
    poll_seconds: float = Field(0.02, gt=0, description="How long the leader waits for more records before it decides.")
