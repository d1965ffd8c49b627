"""The local backends: bubblewrap sandboxes, and plain processes where an operator allows them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from polar.runtime.interface import Probe, Runtime
from polar.runtime.local.runtime import LocalRuntime
from polar.runtime.local.settings import LocalSettings
from polar.runtime.local.unsafe import UnsafeLocalRuntime

__all__ = ["LocalRuntime", "LocalSettings", "UnsafeLocalRuntime", "choose_local"]


async def choose_local(settings: Mapping[str, Any]) -> tuple[Runtime, Probe]:
    """The sandbox where it works; else plain processes, if `allow_unsafe_local` is set; with what the probe said.

    The probe of the result may be not ok: then nothing local works here, and its hint says what to change.
    """
    sandbox = await asyncio.to_thread(LocalRuntime.configure, settings)
    probe = await sandbox.probe()
    if probe.ok or not settings.get("allow_unsafe_local"):
        return sandbox, probe
    unsafe = await asyncio.to_thread(UnsafeLocalRuntime.configure, settings)
    weaker = await unsafe.probe()
    return unsafe, Probe(weaker.ok, f"{weaker.reason}; no sandbox: {probe.reason}", probe.hint, weaker.capabilities)
