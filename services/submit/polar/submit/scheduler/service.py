"""The scheduler's shell: who leads, and what becomes of a leadership that ends.

Leadership needs no election. Whoever starts the producer `polar-scheduler` fences the predecessor, whose next
transaction fails; who is fenced becomes a standby, which follows the ticks and takes over when they stay away (see
`turns.py`). All state is in `polar.leases`, so a leader that fails in any way starts anew from there (see `term.py`).
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter

import structlog
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusError, Fenced, Out, RecordTooLarge, Transactional
from polar.schemas import RecordRef
from polar.schemas.validation import Limits

from .core import Scheduler
from .grading import SignBox
from .metrics import SchedulerMetrics
from .settings import SchedulerSettings
from .term import Poisoned, Term, about
from .turns import TICK_KEY, Turns

TRANSACTIONAL_ID = "polar-scheduler"
TRIES = 2
"""A record at which the machine fails is read so often before it goes to `dead`."""
RESIGN_S = 3.0
"""How long a leader that stops may take to say so."""

log = structlog.get_logger("polar.submit.scheduler")


class SchedulerStuck(BusError):
    """The leader stood still again and again; a new process may do better."""

    retryable = False


class SchedulerService:
    """Runs until cancelled, as leader or standby; every decision is written before anything acts on it."""

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        limits: Limits,
        sign_box: SignBox,
        *,
        leader_id: str,
        inline_instruction_bytes: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`leader_id` tells this process's ticks from another's; a new one for each process. `registry`: where the
        metrics go; None: nobody reads them."""
        self._bus = bus
        self._settings = settings
        self._limits = limits
        self._sign_box = sign_box
        self._leader_id = leader_id
        self._inline = inline_instruction_bytes
        self._turns = Turns(bus, settings, leader_id)
        self._metrics = SchedulerMetrics(registry or CollectorRegistry())
        self._terms = 0
        self._stood_still = 0
        """Terms in a row that the watchdog has ended."""
        self._suspects: Counter[RecordRef] = Counter()
        self._too_large: dict[str, str] = {}
        """Session, task or group → why what follows from it cannot be written."""
        self.leading = asyncio.Event()
        """Set while this process leads and has read its state."""

    async def run(self) -> None:
        """Leads or stands by until cancelled.

        Raises:
            RecordGone: the log has lost records that no leader had read; see the setting `accept_loss`.
            SchedulerStuck: it stood still `watchdog_restarts` times in a row.
            BusError: not retryable, such as a missing permission.
        """
        fenced = False
        while True:
            reason = await self._turns.wait(fenced=fenced)
            log.info("taking the lead", reason=reason)
            fenced = False
            try:
                await self._lead()
            except Fenced:
                log.warning("another scheduler leads now; standing by")
                self._metrics.ended.labels("fenced").inc()
                fenced = True
            except RecordTooLarge as error:
                self._metrics.ended.labels("too_large").inc()
                self._learn(error)
            except BusError as error:
                if not error.retryable:
                    raise
                self._metrics.ended.labels("log").inc()
                log.warning("the log failed the leader; starting anew from it", error=str(error))
                await self._bus.clock.sleep(self._settings.tick_seconds)
            except Poisoned as poisoned:
                self._metrics.ended.labels("poison").inc()
                self._suspects[poisoned.ref] += 1
                trace = await asyncio.to_thread(traceback.format_exception, poisoned)  # reads source files
                log.error(
                    "a record cannot be taken; starting anew from the log",
                    tries=self._suspects[poisoned.ref],
                    exception="".join(trace),
                )
            finally:
                self.leading.clear()
                self._metrics.leading.set(0)

    async def _lead(self) -> None:
        transactional = await self._bus.transactional(TRANSACTIONAL_ID)
        try:
            self._terms += 1
            self._metrics.terms.inc()
            machine = Scheduler(self._settings, self._limits, self._sign_box)
            machine.world.too_large = dict(self._too_large)
            term = Term(
                self._bus,
                transactional,
                machine,
                f"{self._leader_id}/{self._terms}",
                self._settings,
                self._inline,
                {ref for ref, tries in self._suspects.items() if tries >= TRIES},
            )
            await self._watched(term)
        except asyncio.CancelledError:
            await self._resign(transactional)
            raise
        finally:
            await transactional.close()

    async def _watched(self, term: Term) -> None:
        """The term, ended where it makes no step for `watchdog_s`: by a pause of the process, or by a fault."""
        loop, limit_s = asyncio.get_running_loop(), self._settings.watchdog_s
        try:
            async with asyncio.timeout(limit_s) as watchdog:

                def alive() -> None:
                    watchdog.reschedule(loop.time() + limit_s)

                def leads() -> None:
                    self._stood_still = 0
                    self.leading.set()
                    self._metrics.leading.set(1)

                await term.lead(leads, alive)
        except TimeoutError:
            if not watchdog.expired():
                raise
            self._stood_still += 1
            self._metrics.ended.labels("stood_still").inc()
            log.error(
                "the leader stood still; starting anew from the log", seconds=limit_s, times_in_a_row=self._stood_still
            )
            if self._stood_still > self._settings.watchdog_restarts:
                raise SchedulerStuck(
                    f"the scheduler made no step for {limit_s:g} s, {self._stood_still} times in a row "
                    "(POLAR_SCHEDULER_WATCHDOG_S); the process ends so that its supervisor starts another"
                ) from None

    async def _resign(self, transactional: Transactional) -> None:
        """Takes the tick back, so that nobody need wait for its silence."""
        try:
            async with asyncio.timeout(RESIGN_S):
                if not transactional.usable:  # a commit was interrupted
                    await transactional.close()
                    transactional = await self._bus.transactional(TRANSACTIONAL_ID)
                async with transactional.transaction() as transaction:
                    await transaction.send(Out("nodes", TICK_KEY, None))
                await transactional.close()
        except (BusError, TimeoutError) as error:
            log.info("could not resign; a standby will see the silence", error=repr(error))

    def _learn(self, error: RecordTooLarge) -> None:
        """What is too large for the log must not stop the leader: the next term answers it with a failure.

        Raises:
            RecordTooLarge: it is too large even so.
        """
        cause = None if error.out is None else about(error.out)
        if cause is None or cause in self._too_large:
            raise error
        self._too_large[cause] = str(error)
        log.error(
            "a record that follows is too large; its cause will end with a failure", cause=cause, error=str(error)
        )
