"""Every way in which a runtime can fail, in one file.

    RuntimeFailure                     base: `retryable`, `hint`
    ├── BackendNotAvailable            the name is unknown, not part of this version, or its extra is missing
    ├── RuntimeUnavailable             the backend cannot work on this machine (probe failed)
    ├── SpecRefused                    the box asked for cannot be given by this backend; another spec might
    ├── BoxStartFailed                 the box, or a command's sandbox, did not start
    ├── BoxGone                        the box was destroyed, or its folder is lost
    ├── PathRefused                    a path leaves the box, goes through a symbolic link, or is no plain file
    ├── TooLarge                       a file or folder is over the given limit of bytes
    └── TransferFailed                 the operating system refused a copy (disk full, missing file)

`retryable` says whether the same request may succeed later or on another node; it is data, so that no caller
has to know the classes. A command that fails, times out or is killed is an outcome and never an error.
"""

from __future__ import annotations

from typing import ClassVar


class RuntimeFailure(Exception):
    """Base of all errors of `polar.runtime`.

    `retryable`: trying again, here or on another node, may help. `hint`: what a person can change, or "".
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class BackendNotAvailable(RuntimeFailure):
    """No backend of this name can be made in this installation."""


class RuntimeUnavailable(RuntimeFailure):
    """The backend exists but does not work on this machine; another node may have a working one."""

    retryable = True


class SpecRefused(RuntimeFailure):
    """The backend cannot give such a box, on any attempt (an image, a GPU, an unknown option)."""


class BoxStartFailed(RuntimeFailure):
    """The box or the sandbox of a command could not be started; the command has not run."""

    retryable = True


class BoxGone(RuntimeFailure):
    """The box does not exist any more; a new attempt needs a new box."""

    retryable = True


class PathRefused(RuntimeFailure):
    """A path that leaves the box, runs through a symbolic link, or names something that is no plain file."""


class TooLarge(RuntimeFailure):
    """A file or folder holds more bytes than the caller allows."""


class TransferFailed(RuntimeFailure):
    """A copy into or out of a box failed in the operating system."""

    retryable = True
