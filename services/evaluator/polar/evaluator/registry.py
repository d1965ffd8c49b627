"""Evaluators by name, loaded when first wanted.

Built in: `session_completed` and `command`. One's own: an entry point of group `polar.evaluators`, or `module:Class`;
either only if the operator allows it by name (`POLAR_EVALUATOR_ALLOW`), since a task may come from anyone.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Final, Protocol

from polar.schemas import EvaluatorSpec, Grade, GradeAssigned, TaskRequest, Trajectory

from .box import BoxClient
from .errors import UnknownEvaluator

GROUP: Final = "polar.evaluators"
BUILT_IN: Final = {
    "session_completed": "polar.evaluator.evaluators.session_completed:SessionCompleted",
    "command": "polar.evaluator.evaluators.command:Command",
}


@dataclass(frozen=True, slots=True)
class Case:
    """What an evaluator is given. The session's trajectory and task are fetched only when asked for."""

    assignment: GradeAssigned
    box: BoxClient | None
    """The session's own box; None: it was not asked for."""
    timeout_s: float
    """Seconds for the whole grade."""
    trajectory: Callable[[], Awaitable[Trajectory]]
    task: Callable[[], Awaitable[TaskRequest]]


class Evaluator(Protocol):
    """Turns a session into a reward. It reports; it decides nothing."""

    version: ClassVar[str]

    def __init__(self, spec: EvaluatorSpec) -> None:
        """Raises `ConfigWrong` when `spec.config` does not fit."""

    async def grade(self, case: Case) -> Grade:
        """The grade; may be cancelled at any time.

        Raises:
            GradingError: there is none; says why, and whether another try may help.
        """
        ...


def load(name: str, allowed: Collection[str] = ()) -> type[Evaluator]:
    """The evaluator class of `name`.

    Raises:
        UnknownEvaluator: not known, not allowed or not importable.
    """
    target = BUILT_IN.get(name)
    if target is None:
        if name not in allowed:
            known = ", ".join([*BUILT_IN, *sorted(allowed)])
            raise UnknownEvaluator(
                f"no evaluator {name!r} is allowed here; known: {known} (POLAR_EVALUATOR_ALLOW adds more)"
            )
        target = name if ":" in name else _entry_point(name)
    module, _, attribute = target.partition(":")
    try:
        found: type[Evaluator] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownEvaluator(f"evaluator {name!r} cannot be loaded from {target}: {error}") from error
    return found


def _entry_point(name: str) -> str:
    for one in entry_points(group=GROUP, name=name):
        return one.value
    raise UnknownEvaluator(f"evaluator {name!r} is allowed, but no installed package offers it under {GROUP!r}")
