"""Runtimes: boxes in which agents run, behind one small interface, with backends that are loaded by name.

`create_runtime("local", {"root": ...})` gives a `Runtime`; see `interface.py` for what it promises and `errors.py` for
every way in which it can fail.
"""

from polar.runtime.errors import (
    BackendNotAvailable,
    BoxGone,
    BoxStartFailed,
    PathRefused,
    RuntimeFailure,
    RuntimeUnavailable,
    SpecRefused,
    TooLarge,
    TransferFailed,
)
from polar.runtime.interface import (
    Box,
    BoxInfo,
    BoxSpec,
    Capabilities,
    Door,
    Download,
    ExecOutcome,
    Network,
    Probe,
    Runtime,
)
from polar.runtime.registry import BACKENDS, Backend, create_runtime

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendNotAvailable",
    "Box",
    "BoxGone",
    "BoxInfo",
    "BoxSpec",
    "BoxStartFailed",
    "Capabilities",
    "Door",
    "Download",
    "ExecOutcome",
    "Network",
    "PathRefused",
    "Probe",
    "Runtime",
    "RuntimeFailure",
    "RuntimeUnavailable",
    "SpecRefused",
    "TooLarge",
    "TransferFailed",
    "create_runtime",
]
