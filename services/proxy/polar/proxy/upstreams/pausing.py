"""Pauses for new weights: who is let in, who is broken off, and what is asked again afterwards.

- `drain`: new calls wait, those that run may end.
- `abort`: new calls wait, those that run end now; what they have is captured as cut. The engine is asked to do it, so
  that calls of other replicas end too; where it cannot, its connections are closed.
- `keep`: new calls wait, those that run are frozen in the engine and go on with the new weights.

A resume lets the waiting go on, after the engine has said anew what it is and which weights it has. A pause outlives
whoever asked for it; its calls do not: they wait as long as any (`engine_wait`), and are then told to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from polar.service.clock import Clock
from polar.service.logs import get_logger

from ..errors import BadRequest, EngineAway, EngineError, EngineTimeout
from .upstream import Upstream

Mode = Literal["drain", "abort", "keep"]
ABORT_GRACE_S = 5.0
"""An aborted call ends in milliseconds; one that the engine had not yet begun with hangs in it instead."""
CUT_EVERY_S = 0.2
log = get_logger(__name__)


class Pauses:
    """See above."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def pause(self, upstreams: Sequence[Upstream], mode: Mode, within: float) -> bool:
        """Pause them; whether all are idle (`keep`: frozen) within so many seconds. They stay paused either way.

        Raises:
            BadRequest: `keep`, and an engine cannot freeze its calls; nothing is paused then.
            EngineError: `keep`, and an engine does not answer.
        """
        if mode == "keep":
            await self._freeze(upstreams)
            return True
        for upstream in upstreams:
            upstream.paused_by_trainer(mode)
        log.info("engines paused", mode=mode, engines=[one.url for one in upstreams])
        try:
            async with asyncio.timeout(within), asyncio.TaskGroup() as group:
                for upstream in upstreams:
                    group.create_task(self._emptied(upstream, abort=mode == "abort"))
        except TimeoutError:
            return False
        return True

    async def resume(self, upstreams: Sequence[Upstream]) -> None:
        """Let them go on.

        Raises:
            EngineError: an engine that was paused from here does not answer; it and those after it stay paused.
        """
        for upstream in upstreams:
            if upstream.pauses_engine:
                if not await upstream.endpoint.resume():
                    log.warning("engine has no route to resume it", engine=upstream.url)
                upstream.pauses_engine = False
        async with asyncio.TaskGroup() as group:
            for upstream in upstreams:
                group.create_task(self._reopen(upstream))
        log.info("engines resumed", engines=[one.url for one in upstreams])

    async def _freeze(self, upstreams: Sequence[Upstream]) -> None:
        frozen: list[Upstream] = []
        try:
            for upstream in upstreams:
                upstream.paused_by_trainer("keep")
                frozen.append(upstream)
                upstream.pauses_engine = True  # as in `_abort`
                upstream.pauses_engine = await upstream.endpoint.pause("keep")
                if not upstream.pauses_engine:
                    raise BadRequest(
                        f"{upstream.url} cannot freeze its calls; use drain or abort (vLLM: VLLM_SERVER_DEV_MODE=1).",
                        status=409,
                        code="cannot_keep",
                    )
        except BaseException:
            for upstream in frozen:
                await self._thaw(upstream)
            raise

    async def _thaw(self, upstream: Upstream) -> None:
        """Undo a freeze; where the engine does not answer, the next resume asks it again."""
        if upstream.pauses_engine:
            try:
                await upstream.endpoint.resume()
                upstream.pauses_engine = False
            except EngineError as error:
                log.warning("engine not resumed; resume it", engine=upstream.url, reason=error.message)
        upstream.paused_by_trainer(None)

    async def _emptied(self, upstream: Upstream, *, abort: bool) -> None:
        if abort:
            await self._abort(upstream)
        await upstream.line.idle()

    async def _abort(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(ABORT_GRACE_S):
                upstream.pauses_engine = (
                    True  # until it says otherwise: its answer may be lost, and a resume is harmless
                )
                upstream.pauses_engine = await upstream.endpoint.pause("abort")
                if upstream.pause_mode is None:
                    await self._thaw(upstream)  # it was resumed meanwhile, perhaps before the engine was paused
                elif upstream.pauses_engine:
                    await upstream.line.idle()
        except TimeoutError:
            log.warning("calls outlived the engine's abort", engine=upstream.url, calls=upstream.line.sizes[0])
        except EngineError as error:
            upstream.pauses_engine = isinstance(error, EngineTimeout)
            log.warning("the engine did not abort", engine=upstream.url, reason=error.message)
        while upstream.line.sizes[0] and upstream.pause_mode == "abort":
            # again and again: a call that is just about to begin cannot be ended yet; but none that a resume let in
            upstream.cut(EngineAway("the generation was broken off for new weights; try again", retry_after=1.0))
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_EVERY_S):
                    await upstream.line.idle()

    async def _reopen(self, upstream: Upstream) -> None:
        endpoint = upstream.endpoint
        try:
            upstream.seen_paused(await endpoint.paused(), self._clock.monotonic())
            if upstream.engine_paused_since is None:
                endpoint.forget()
                await endpoint.identity()
                await endpoint.weight_version()
        except EngineError as error:
            log.warning("engine not met again yet", engine=upstream.url, reason=error.message)
        finally:
            upstream.paused_by_trainer(None)


async def state(upstream: Upstream) -> dict[str, Any]:
    """What an operator wants to know of an engine, its weights as it tells them now."""
    endpoint = upstream.endpoint
    try:
        version = await endpoint.weight_version() or endpoint.version
    except EngineError:
        version = endpoint.version
    seated, waiting = upstream.line.sizes
    engine = endpoint.engine
    return {
        "endpoint": upstream.url,
        "model": upstream.spec.model,
        "kind": endpoint.shape.name,
        "served": None if engine is None else engine.model,
        "build": None if engine is None else engine.build,
        "logprobs_mode": None if engine is None else str(engine.logprobs_mode),
        "usable": upstream.usable,
        "reason": upstream.health.out or (None if endpoint.unfit is None else endpoint.unfit.message),
        "paused": upstream.pause_mode or ("engine" if upstream.engine_paused_since is not None else None),
        "calls": seated,
        "waiting": waiting,
        "weight_version": version,
    }
