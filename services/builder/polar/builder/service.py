"""The builder as a service: as many as one likes share the partitions of `completions`.

Promises: each session that is closed on the log gets exactly one trajectory in `built` and one BUILT report, whatever
is killed and started again.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from polar.bus import Bus, PartitionWorker, Progress

from .bodies import BodyStore
from .metrics import BuilderMetrics
from .processor import SessionProcessor
from .settings import BuilderSettings
from .texts import Tokenizers


class BuilderService:
    """One process of the builder."""

    def __init__(
        self, bus: Bus, settings: BuilderSettings, *, state_dir: Path, registry: CollectorRegistry | None = None
    ) -> None:
        """
        Args:
            bus: opened, of service `builder`.
            state_dir: where the cache file is made, unless the settings name a folder.
            registry: where the metrics go; None: nobody reads them.
        """
        self._bus = bus
        self._settings = settings
        self._folder = settings.cache_dir or state_dir / "builder"
        self._registry = registry or CollectorRegistry()
        self._metrics = BuilderMetrics(self._registry)
        self._worker: PartitionWorker | None = None

    @property
    def ready(self) -> bool:
        """Whether it is a member of its group."""
        return self._worker is not None and self._worker.joined

    def progress(self) -> dict[int, Progress]:
        """Where it is, by partition it has."""
        return self._worker.progress() if self._worker is not None else {}

    async def run(self) -> None:
        """Builds until cancelled.

        Raises:
            TopicsWrong: the topics are not as the topic table wants them.
            RecordGone: records were lost before they were processed; see the setting `accept_loss`.
        """
        await self._bus.prepare()
        store = BodyStore(self._folder, self._settings.memory_bytes)
        tokenizers = Tokenizers(self._settings.tokenizers)
        try:
            self._worker = PartitionWorker(
                self._bus,
                "completions",
                "builder",
                lambda _: SessionProcessor(
                    store.scope(), self._metrics, self._bus.clock, self._settings.allow, tokenizers
                ),
                max_batch=self._settings.max_batch,
                accept_loss=self._settings.accept_loss,
                registry=self._registry,
            )
            await self._worker.run()
        finally:
            self._worker = None
            await store.close()
