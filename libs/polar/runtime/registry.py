"""The known backends, loaded when one is asked for, so that importing `polar.runtime` costs next to nothing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from polar.runtime.errors import BackendNotAvailable
from polar.runtime.interface import Runtime


@dataclass(frozen=True)
class Backend:
    """Where a backend lives. `module` None: its name is known, but it is not part of this version.

    The class has `configure(settings: Mapping) -> Runtime`, which raises SpecRefused for wrong settings. `extra` is
    the optional dependency group of polar-rollout that it needs, or "" where another package brings the backend.
    """

    module: str | None
    attribute: str = ""
    extra: str = ""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "local": Backend("polar.runtime.local.runtime", "LocalRuntime", "gateway"),
        "local-unsafe": Backend("polar.runtime.local.unsafe", "UnsafeLocalRuntime", "gateway"),
        "docker": Backend(None),
        "apptainer": Backend(None),
    }
)


def create_runtime(name: str, settings: Mapping[str, Any], *, backends: Mapping[str, Backend] = BACKENDS) -> Runtime:
    """Make the backend called `name`; one of your own goes into `backends={**BACKENDS, "mine": Backend(...)}`.

    Raises BackendNotAvailable, SpecRefused (settings).
    """
    backend = backends.get(name)
    if backend is None:
        raise BackendNotAvailable(f"no runtime is called {name!r}", hint=f"known: {', '.join(sorted(backends))}")
    if backend.module is None:
        usable = sorted(key for key, item in backends.items() if item.module)
        raise BackendNotAvailable(
            f"the runtime {name!r} is not part of this version", hint=f"usable: {', '.join(usable)}"
        )
    try:
        kind = getattr(importlib.import_module(backend.module), backend.attribute)
    except ImportError as error:
        hint = (
            f"pip install 'polar-rollout[{backend.extra}]'" if backend.extra else f"{backend.module} must be importable"
        )
        raise BackendNotAvailable(f"the runtime {name!r} cannot be loaded: {error}", hint=hint) from error
    return cast(Runtime, kind.configure(settings))
