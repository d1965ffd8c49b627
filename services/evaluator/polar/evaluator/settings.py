"""Settings of grading and finishing: POLAR_EVALUATOR_… in the environment, `evaluator:` in the file."""

from __future__ import annotations

import socket
from typing import ClassVar, Literal

from pydantic import Field

from polar.service.settings import PolarSettings, section_config


def _node_id() -> str:
    return f"grader-{socket.gethostname()}"


class EvaluatorSettings(PolarSettings):
    section: ClassVar[str] = "evaluator"
    model_config = section_config("evaluator")

    stage: Literal["all", "grade", "finish"] = Field(
        "all", description="What this process does: grade sessions, publish what is graded, or both."
    )
    node_id: str = Field(
        default_factory=_node_id,
        description="Name of this grader; each running grader needs its own. Unset: after the host.",
    )
    slots: int = Field(8, ge=1, description="Sessions graded at once.")
    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between heartbeats.")
    connect_timeout_s: float = Field(10.0, gt=0, description="Seconds to reach a gateway's runtime API.")
    gateway_patience_s: float = Field(
        30.0,
        ge=0,
        description="Seconds for which a gateway that refuses connections is tried again: its boxes outlive a restart.",
    )
    max_timeout_s: float = Field(
        86_400.0, gt=0, description="Longest grade, whatever a task's evaluation_timeout says."
    )
    allow: frozenset[str] = Field(
        frozenset(),
        description="Evaluators that are not built in and may be used: names of entry points of `polar.evaluators`, or "
        "module:Class.",
    )
    max_batch: int = Field(100, ge=1, description="Finished sessions per transaction at most.")
    accept_loss: bool = Field(
        False,
        description="Go on where the log has already lost grades that were not processed, instead of stopping; their "
        "sessions then have no trajectory.",
    )
