"""What is done to whom, and when: a pure function of a seed.

An event is due once so many engine calls have finished, so it falls into the work on any machine; how long a stop
lasts is in seconds, since what it tests (silence, leases, time-outs) is told by clocks. The same seed and number of
calls give the same schedule; every target meets everything that can happen to it at least once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

What = Literal["kill", "stop"]

SERVICES = ("leader", "standby", "gateway-a", "gateway-b", "proxy", "builder", "evaluator")
"""`leader` and `standby` are roles: whichever submit has them when the event is due."""
BROKER = "broker"

KILLED_S = (0.0, 2.0)
"""How long a killed process stays away."""
BROKER_KILLED_S = (0.0, 3.0)
SHORT_STOP_S = (0.5, 3.0)
"""Nobody notices but who waits for it."""
LONG_STOP_S = {"leader": (7.0, 9.0), "gateway-a": (11.0, 14.0), "gateway-b": (11.0, 14.0), "builder": (7.0, 9.0)}
"""Longer than a take-over, a node's silence, a group's session: what the process held is given to others."""

FIRST, LAST = 0.03, 0.6
"""Events fall between these shares of the calls that the work needs, so that it never ends before they do."""


@dataclass(frozen=True, order=True)
class Fault:
    """`kill`: SIGKILL, and a new start after `seconds`. `stop`: SIGSTOP, and SIGCONT after `seconds`."""

    after: int
    """Due once so many engine calls have finished."""
    target: str
    what: What
    seconds: float

    def __str__(self) -> str:
        return f"after {self.after} calls: {self.what} {self.target} for {self.seconds:.2f} s"


def schedule(seed: int, calls: int, *, extra: int = 12) -> list[Fault]:
    """The faults for work that takes `calls` finished engine calls, in order.

    Each service is killed and stopped once, those of `LONG_STOP_S` stopped for long besides, the broker killed twice;
    `extra` more are drawn freely.

    Raises:
        ValueError: so few calls do not give each fault a moment of its own.
    """
    chooser = random.Random(seed)
    drawn: list[tuple[str, What, tuple[float, float]]] = [(BROKER, "kill", BROKER_KILLED_S)] * 2
    for target in SERVICES:
        drawn += [(target, "kill", KILLED_S), (target, "stop", SHORT_STOP_S)]
        if target in LONG_STOP_S:
            drawn.append((target, "stop", LONG_STOP_S[target]))
    for _ in range(extra):
        target = chooser.choice(SERVICES)
        either: list[tuple[str, What, tuple[float, float]]]
        either = [(target, "kill", KILLED_S), (target, "stop", SHORT_STOP_S)]
        drawn.append(chooser.choice(either))
    chooser.shuffle(drawn)
    moments = range(max(1, round(calls * FIRST)), round(calls * LAST))
    if len(moments) < len(drawn):
        raise ValueError(f"{calls} calls are too few for {len(drawn)} faults")
    after = sorted(chooser.sample(moments, len(drawn)))
    return [
        Fault(due, target, what, round(chooser.uniform(*seconds), 3))
        for due, (target, what, seconds) in zip(after, drawn, strict=True)
    ]
