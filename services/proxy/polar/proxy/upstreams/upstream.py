"""One engine as calls see it: its client, its line, whether it is in rotation and whether it is paused.

A pause has two sources, which are kept apart: a trainer asked this proxy for it, or the engine says that somebody has
paused it. Its line is shut while either holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polar.service.logs import get_logger

from ..engine import Endpoint
from ..errors import EngineTimeout, ProxyError
from .health import ILL, Health
from .line import Line
from .metrics import EngineMetrics
from .spec import EngineSpec

if TYPE_CHECKING:
    from .place import Place

log = get_logger(__name__)


class Upstream:
    """See above. `endpoint` is set by whoever makes it: it tells this object how the engine behaves."""

    endpoint: Endpoint

    def __init__(self, url: str, spec: EngineSpec, metrics: EngineMetrics, *, seats: int, room: int, failures: int):
        self.url = url
        self.spec = spec
        self.line: Line[Place] = Line(seats=seats, room=room)
        self.health = Health(failures)
        self.pause_mode: str | None = None
        """How a trainer has paused it; None: it has not."""
        self.engine_paused_since: float | None = None
        """Since when the engine itself is seen to be paused, on the proxy's clock."""
        self.pauses = 0
        """Counts the times that its line was shut."""
        self.pauses_engine = False
        """The engine was paused from here, and has to be resumed from here."""
        self._metrics = metrics
        self._labels = (url, spec.model)
        self._gauges = [
            one.labels(*self._labels) for one in (metrics.open, metrics.waiting, metrics.up, metrics.paused)
        ]
        self._unfit: str | None = None
        """What was said of it."""

    @property
    def usable(self) -> bool:
        """Whether it is in rotation: a paused one is, its calls wait."""
        return self.health.out is None and self.endpoint.unfit is None

    @property
    def is_paused(self) -> bool:
        return self.pause_mode is not None or self.engine_paused_since is not None

    # what the endpoint and the keeper see ---------------------------------------------------------------------------

    def refused(self) -> None:
        self._changed(self.health.refused())

    def broke(self) -> None:
        self._changed(self.health.broke())

    def answered(self) -> None:
        self._changed(self.health.answered())

    def said(self, well: bool) -> None:
        """What it said of itself, or that it said nothing."""
        self._changed(self.health.well() if well else self.health.ill())

    def note_fitness(self) -> None:
        """Say so, once, where it failed its self-test or does not serve its model; whoever has found that out."""
        unfit = self.endpoint.unfit
        why = None if unfit is None else unfit.message
        if why == self._unfit:
            return
        self._unfit = why
        if why is not None:
            log.error("engine cannot be used", engine=self.url, model=self.spec.model, reason=why)
            self._metrics.ejections.labels(*self._labels, "unfit").inc()
            self.send_away()
        self.tell()

    def _changed(self, changed: bool) -> None:
        if not changed:
            return
        if self.health.out is None:
            log.info("engine is back", engine=self.url)
        else:
            log.warning("engine gets no calls", engine=self.url, reason=self.health.out)
            self._metrics.ejections.labels(*self._labels, self.health.out).inc()
            if self.health.out == ILL:
                self.endpoint.forget()
            self.send_away()
        self.tell()

    def send_away(self) -> None:
        """Let those who wait here wait elsewhere, in their order, where there is an elsewhere."""
        for place in self.line.waiting:
            place.move()

    # pauses ---------------------------------------------------------------------------------------------------------

    def paused_by_trainer(self, mode: str | None) -> None:
        """`mode` None: it may go on."""
        self.pause_mode = mode
        self._shut_or_open()

    def seen_paused(self, paused: bool, now: float) -> None:
        """What the engine says of itself."""
        if paused == (self.engine_paused_since is not None):
            return
        if self.pause_mode is None:
            log.info("engine was paused" if paused else "engine goes on", engine=self.url)
        self.engine_paused_since = now if paused else None
        self._shut_or_open()

    def give_up_on(self, silence: float, now: float) -> None:
        """Break off the calls of an engine that somebody else has paused for longer than `silence`."""
        since = self.engine_paused_since
        if self.pause_mode is None and since is not None and now - since > silence:
            self.cut(EngineTimeout("the engine was paused for too long; try again later"))

    def cut(self, error: ProxyError) -> None:
        """End the calls that it has with `error`; what has come of them is kept."""
        for place in self.line.seated:
            place.cut(error)

    def _shut_or_open(self) -> None:
        if self.is_paused:
            self.pauses += 1
            self.line.shut()
        else:
            self.line.reopen()
        self.tell()

    def tell(self) -> None:
        """Bring the gauges up to date."""
        for gauge, value in zip(self._gauges, (*self.line.sizes, self.usable, self.is_paused), strict=True):
            gauge.set(value)
