"""How each coding CLI takes what cannot be answered: measured, held by test_refusals.py, told in docs/harnesses.md."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """How a CLI takes a refusal. `tries`: the least and the most generations it asks for."""

    code: int
    tries: tuple[int, int]
    told: str
    """Part of what it tells its user, in whatever case."""


OVERFLOW = {
    "claude-code": Ending(1, (1, 2), "too long"),
    "codex": Ending(1, (1, 1), "context window"),
    "gemini-cli": Ending(144, (1, 1), "exceeds the maximum number of tokens"),
    "qwen-code": Ending(1, (1, 1), "maximum context length"),
    # the title, the turn, and a compaction that is too long as well
    "opencode": Ending(1, (2, 4), "ContextOverflowError"),
    # it exits 0 without any work done: only its events tell
    "pi": Ending(0, (1, 1), "maximum context length"),
}
UNKNOWN = {
    "claude-code": Ending(1, (2, 2), "model"),
    "codex": Ending(1, (1, 1), "no engine here serves"),
    "gemini-cli": Ending(1, (1, 1), "no engine here serves"),
    "qwen-code": Ending(1, (1, 1), "no engine here serves"),
    "opencode": Ending(1, (2, 2), "no engine here serves"),
    "pi": Ending(0, (1, 1), "no engine here serves"),
}
