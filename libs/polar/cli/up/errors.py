"""Why `polar up` cannot start or go on: one class, since all of them end in one line and a non-zero exit."""

from __future__ import annotations


class CannotUp(Exception):
    """The message says what is wrong, `hint` what to do; `bad_input` where the caller can mend it with other words."""

    def __init__(self, message: str, *, hint: str | None = None, bad_input: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.bad_input = bad_input
