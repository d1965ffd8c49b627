"""What can go wrong on a gateway node, apart from what `polar.runtime` and `polar.bus` call by name.

NodeInUse            this node's state is another process's: the process does not start
NoBackend            no runtime works here: the process does not start
AttemptFailed        ends one attempt; carries the report's `Failure`
ApiError             an answer of the runtime API: HTTP status, code and message
"""

from __future__ import annotations

from polar.schemas import Failure


class NodeInUse(Exception):
    """Two processes of one half would report each other's attempts as lost."""


class NoBackend(Exception):
    """None of the node's runtimes works on this machine."""


class AttemptFailed(Exception):
    """An attempt cannot go on. `exit_code`: of the command that failed, where there is one."""

    def __init__(self, failure: Failure, *, exit_code: int | None = None, output_tail: str = "") -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = exit_code
        self.output_tail = output_tail


class ApiError(Exception):
    """A refused request. `code` is for programs, `message` for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
