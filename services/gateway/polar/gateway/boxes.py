"""The node's runtimes and the boxes in them, each box one object per process.

One object per box, because what a box knows of its running commands lives in the object: whoever destroys it must
ask the same one that runs the harness. All boxes bear the node's label, so that a reaper finds those nobody owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from polar.runtime import BackendNotAvailable, Box, BoxSpec, Door, Runtime, RuntimeFailure, create_runtime
from polar.service.logs import get_logger

from .errors import NoBackend
from .machine import Row
from .settings import GatewaySettings

log = get_logger(__name__)

LOCAL = "local"
UNSAFE = "local-unsafe"
LABEL = "polar-node"
"""Not plain `node`: a Docker engine is shared with others who label containers."""


def labels(row: Row) -> dict[str, str]:
    return {LABEL: row.node, "polar-session": row.session_id, "polar-attempt": str(row.attempt)}


async def open_runtimes(settings: GatewaySettings, box_root: Path) -> dict[str, Runtime]:
    """The runtimes that work here, by the names that tasks use: each is made and tried.

    Raises:
        NoBackend: the default one does not work; the message holds its reason and what to change.
    """
    wanted = dict.fromkeys((settings.default_backend, *settings.backends))
    found: dict[str, Runtime] = {}
    for name in wanted:
        options = dict(settings.backends.get(name, {}))
        try:
            runtime = await (_local(settings, box_root, options) if name == LOCAL else _made(name, options))
            probe = await runtime.probe()
            reason, hint = probe.reason, probe.hint
            works = probe.ok
        except RuntimeFailure as failure:
            reason, hint, works = failure.message, failure.hint, False
        if works:
            found[name] = runtime
            log.info("runtime works", backend=name, runtime=runtime.name, weaker=reason or None)
        elif name == settings.default_backend:
            raise NoBackend(
                f"the default runtime {name!r} does not work here: {reason}" + (f" ({hint})" if hint else "")
            )
        else:
            log.warning("runtime does not work", backend=name, reason=reason, hint=hint)
    return found


async def _local(settings: GatewaySettings, box_root: Path, options: dict[str, Any]) -> Runtime:
    """The sandbox where one works, else, where the operator allows it, plain processes."""
    values = {"root": box_root, **options}
    runtime = await _made(LOCAL, values)
    if settings.allow_unsafe_local and not (probe := await runtime.probe()).ok:
        log.warning("no sandbox: harnesses run as plain processes of this user", reason=probe.reason, hint=probe.hint)
        return await _made(UNSAFE, {**values, "allow_unsafe_local": True})
    return runtime


async def _made(name: str, options: Mapping[str, Any]) -> Runtime:
    return await asyncio.to_thread(create_runtime, name, options)  # imports modules and looks at folders


class Boxes:
    """Creates, finds and destroys the boxes of this node. A box found once is kept until `destroy`."""

    def __init__(self, runtimes: Mapping[str, Runtime], door: Door, node: str) -> None:
        self._runtimes = runtimes
        self._door = door
        self._node = node
        self._open: dict[str, Box] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    @property
    def backends(self) -> list[str]:
        return list(self._runtimes)

    def runtime(self, backend: str) -> Runtime:
        """Raises BackendNotAvailable."""
        runtime = self._runtimes.get(backend)
        if runtime is None:
            raise BackendNotAvailable(
                f"this node has no runtime {backend!r}", hint=f"it has {', '.join(self._runtimes)}"
            )
        return runtime

    async def create(self, row: Row, spec: BoxSpec) -> Box:
        """Raises RuntimeFailure."""
        box = await self.runtime(row.backend).create(spec, self._door)
        self._open[row.box_id] = box
        return box

    async def find(self, row: Row) -> Box | None:
        """The row's box, or None where it does not exist (any more). Raises RuntimeFailure."""
        found = self._open.get(row.box_id)
        if found is not None:
            return found
        async with self._turns.setdefault(row.box_id, asyncio.Lock()):
            if row.box_id not in self._open:
                box = await self.runtime(row.backend).attach(row.box_id, self._door)
                if box is None:
                    return None
                self._open[row.box_id] = box
        return self._open[row.box_id]

    async def destroy(self, row: Row) -> None:
        """Kill and delete the row's box, if there is one. Raises RuntimeFailure."""
        box = await self.find(row)
        if box is not None:
            await box.destroy()
        self._open.pop(row.box_id, None)
        self._turns.pop(row.box_id, None)

    def keep(self, owned: Collection[str]) -> None:
        """Forget all boxes but these, for the other half may have destroyed them."""
        for box_id in self._open.keys() - owned:
            del self._open[box_id]
        for box_id in self._turns.keys() - owned:
            del self._turns[box_id]

    async def reap(self, owned: Callable[[], Awaitable[Collection[str]]]) -> list[str]:
        """Destroy every box of this node that is not among `owned` (box ids); returns their ids.

        A box is on the books before it is made, and the books are asked after the boxes were listed: a listed box
        that is not on them belongs to nobody. Raises RuntimeFailure.
        """
        reaped = []
        for runtime in self._runtimes.values():
            found = await runtime.boxes(**{LABEL: self._node})
            known = await owned() if found else ()
            for info in found:
                if info.box_id in known:
                    continue
                box = self._open.pop(info.box_id, None) or await runtime.attach(info.box_id, self._door)
                if box is not None:
                    await box.destroy()
                    reaped.append(info.box_id)
        return reaped
