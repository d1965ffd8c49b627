"""The one vocabulary of failure.

A failure is data that travels with events; `retryable` says whether doing the same again can help, so that nobody
decides by matching text. Infrastructure is retried by default, the policy's own doing never.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .base import Part


class FailureKind(StrEnum):
    TASK = "task"
    """The task itself is wrong: a bad image, a prepare command that fails."""
    INFRA = "infra"
    """A machine, a network or a broker failed; nothing is known about the policy."""
    HARNESS = "harness"
    """The harness could not start or ended with an error."""
    PROVIDER = "provider"
    """The model behind the proxy failed or was away."""
    POLICY = "policy"
    """What the model did ended the session: over its budget of tokens, forbidden action."""
    EVALUATOR = "evaluator"
    """The grader failed, not the graded."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    """The agent's own time was up; what it did is built and graded."""
    NO_COMPLETIONS = "no_completions"
    """The harness ran and no call was captured: the wiring is broken, which is not reward 0."""


RETRYABLE_BY_DEFAULT = frozenset({FailureKind.INFRA})

UNGRADED = frozenset(
    {
        FailureKind.TASK,
        FailureKind.INFRA,
        FailureKind.PROVIDER,
        FailureKind.CANCELLED,
        FailureKind.NO_COMPLETIONS,
    }
)
"""Kinds after which a session gets no reward: what the policy did is unknown or was not its doing."""


class Failure(Part, frozen=True, kw_only=True):
    kind: FailureKind
    message: str
    """One line for a person: what is wrong and what to do."""
    retryable: bool = False
    stage: str | None = None
    """The stage it happened in (`polar.schemas.stages.Stage`)."""
    detail: dict[str, Any] | None = None
    """More for a machine or a curious person, e.g. `output_tail`, `exit_code`."""
