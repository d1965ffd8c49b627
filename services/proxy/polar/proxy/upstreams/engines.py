"""All engines: which model has which, which of them is a session's, and what to say where none is.

A session stays with one engine, for the sake of its prefix cache, while that one is in rotation; it moves while it is
not, and returns. Where none of a model's is, the session's own is asked all the same: it may be back.
"""

from __future__ import annotations

import aiohttp

from polar.service.clock import Clock

from ..engine import Endpoint
from ..errors import EngineUnfit, ModelUnknown, Overloaded
from ..settings import ProxySettings
from .choice import choose
from .metrics import EngineMetrics
from .place import Place
from .spec import ANY_MODEL, EngineSpec
from .upstream import Upstream


class Engines:
    """See above. Whoever makes it closes it."""

    def __init__(
        self, settings: ProxySettings, http: aiohttp.ClientSession, clock: Clock, metrics: EngineMetrics
    ) -> None:
        self.settings = settings
        self.clock = clock
        self._http = http
        self._metrics = metrics
        self._pools: dict[str, list[Upstream]] = {}
        for spec in settings.specs:
            self._pools.setdefault(spec.model, []).extend(self._upstream(url, spec) for url in spec.urls)
        self.all = [upstream for pool in self._pools.values() for upstream in pool]

    def _upstream(self, url: str, spec: EngineSpec) -> Upstream:
        settings = self.settings
        upstream = Upstream(
            url,
            spec,
            self._metrics,
            seats=spec.max_calls or settings.max_calls_per_endpoint,
            room=settings.max_waiting_per_endpoint if spec.max_waiting is None else spec.max_waiting,
            failures=settings.engine_failures,
        )
        upstream.endpoint = Endpoint(
            url,
            settings,
            self._http,
            model=spec.asked,
            kind=spec.kind,
            api_key=spec.api_key,
            witness=upstream,
        )
        upstream.tell()
        return upstream

    async def close(self) -> None:
        for upstream in self.all:
            await upstream.endpoint.close()

    def of(self, session_id: str, model: str) -> Upstream:
        """The session's engine.

        Raises:
            ModelUnknown: nobody serves the model.
            EngineUnfit: nobody who serves it can be captured.
        """
        pool = self._pools.get(model) or self._pools.get(ANY_MODEL)
        if pool is None:
            self._metrics.refused.labels("model_not_found").inc()
            raise ModelUnknown(f"No engine here serves the model {model[:100]!r}; see POLAR_PROXY_ENGINES.")
        found = choose(pool, session_id, name=lambda one: one.url, usable=lambda one: one.usable)
        if found.endpoint.unfit is not None and all(one.endpoint.unfit is not None for one in pool):
            raise self._unfit(pool)
        return found

    def _unfit(self, pool: list[Upstream]) -> ModelUnknown | EngineUnfit:
        errors = [one.endpoint.unfit for one in pool if one.endpoint.unfit is not None]
        failed = next((error for error in errors if not isinstance(error, ModelUnknown)), None)
        self._metrics.refused.labels("model_not_found" if failed is None else "unfit").inc()
        if failed is None:
            return ModelUnknown(errors[0].message)
        return EngineUnfit(failed.message, retry_after=failed.retry_after)

    def place(self, session_id: str, model: str) -> Place:
        """A place for one call.

        Raises:
            ModelUnknown, EngineUnfit: as `of`.
            Overloaded: no seat, and nobody more may wait.
        """
        return Place(self, session_id, model, self.of(session_id, model))

    def full(self, upstream: Upstream) -> Overloaded:
        """What a call is told for which there is no room."""
        self._metrics.refused.labels("paused" if upstream.is_paused else "queue_full").inc()
        return Overloaded(
            "The model's engine has as many calls as it may, and as many wait; try again.",
            retry_after=self.settings.retry_after,
        )

    def too_long(self, upstream: Upstream) -> Overloaded:
        """What a call is told that has waited as long as it may."""
        self._metrics.refused.labels("paused" if upstream.is_paused else "queue_deadline").inc()
        why = "is paused for new weights" if upstream.is_paused else "had no room in time"
        return Overloaded(f"The model's engine {why}; try again.", retry_after=self.settings.retry_after)

    def named(self, urls: list[str] | None) -> list[Upstream] | None:
        """Those engines, all by default; None: one of the names is nobody's."""
        if urls is None:
            return list(self.all)
        wanted = {url.rstrip("/") for url in urls}
        found = [one for one in self.all if one.url in wanted or one.endpoint.root in wanted]
        known = {one.url for one in found} | {one.endpoint.root for one in found}
        return found if wanted <= known else None
