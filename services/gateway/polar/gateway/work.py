"""What the slots do: INIT prepares a box, RUN runs the harness in it, teardown takes it away.

Each worker goes from one row of the books to another: it writes the step, then acts, then writes how it went. What it
is doing stands in the books before it is done; what it has reported waits there until the broker has it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from polar.bus import Bus, BusError
from polar.runtime import Box, RuntimeFailure
from polar.schemas import ExitReport, Failure, FailureKind, SessionAssigned, Stage
from polar.schemas.ids import derived
from polar.service.clock import Clock
from polar.service.logs import bound, get_logger
from polar.service.tokens import sign_session

from . import machine
from .artifacts import Folder, Kept, Limits, collect, keep_log
from .boxes import Boxes
from .environment import session_token, workspace
from .errors import AttemptFailed
from .execute import Ended, execute, stop_ending
from .initialize import failed, initialize, instruction_of
from .machine import Ending, Row, Step
from .metrics import Metrics
from .pool import Stop, Stopped
from .settings import GatewaySettings
from .state import Books

log = get_logger(__name__)


class Workers:
    """The work of all three pools. Made once per process; holds no state of its own."""

    def __init__(
        self,
        settings: GatewaySettings,
        books: Books,
        boxes: Boxes,
        bus: Bus,
        clock: Clock,
        metrics: Metrics,
        *,
        secret: str,
        logs: Path,
    ) -> None:
        self._settings = settings
        self._books = books
        self._boxes = boxes
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._secret = secret
        self._logs = logs

    # INIT

    async def init(self, assignment_id: str, stop: Stop) -> None:
        event = await self._books.event(assignment_id)
        step = await self._books.step(assignment_id, lambda row: machine.begin_init(row, self._clock.now_ms()))
        if event is None or step is None:
            return
        with bound(session=event.session_id, task=event.task_id, attempt=event.attempt):
            log.info("initializing", backend=step.row.backend)
            try:
                await stop.unless(initialize(step.row, event, self._boxes, self._bus, self._settings))
            except Stopped as stopped:
                await self._end(assignment_id, stop_ending(stopped, Stage.INITIALIZING))
            except AttemptFailed as error:
                await self._end(assignment_id, _failed_ending(error))
            except BusError as error:
                message = f"the instruction cannot be fetched: {error}"
                await self._end(
                    assignment_id, _failed_ending(failed(FailureKind.INFRA, message, retryable=error.retryable))
                )
            else:
                ready = await self._books.step(assignment_id, lambda row: machine.box_ready(row, self._clock.now_ms()))
                if ready is not None and ready.row.ended:
                    await self._after(ready)

    # RUN

    async def run(self, assignment_id: str, stop: Stop) -> None:
        event = await self._books.event(assignment_id)
        step = await self._books.step(assignment_id, lambda row: machine.begin_run(row, self._clock.now_ms()))
        if event is None or step is None:
            return
        with bound(session=event.session_id, task=event.task_id, attempt=event.attempt):
            log.info("running", harness=event.task.agent.harness or event.task.agent.import_path)
            log_file = self._log(assignment_id)
            kept = Kept()
            alive_s = event.task.timeout_seconds + self._settings.token_margin_s
            token = session_token(event, self._model(event), self._clock.now_ms() + round(alive_s * 1000))
            key = sign_session(token, self._secret)
            box = await self._boxes.find(step.row)
            if box is None:
                ended = Ended(machine.loss("the box had vanished", Stage.RUNNING), ran=False)
            else:
                ended = await self._execute(event, box, key, log_file, stop)
            died_ms = self._clock.now_ms()
            if ended.ran and box is not None:
                await self._keep(event, box, ended.ending, key, log_file, stop, kept)
            await self._end(
                assignment_id,
                ended.ending,
                died_ms=died_ms,
                kept=kept,
                timing_ms={"collect": float(self._clock.now_ms() - died_ms)},
            )
            await asyncio.to_thread(self._log(assignment_id).unlink, missing_ok=True)

    async def _execute(self, event: SessionAssigned, box: Box, key: str, log_file: Path, stop: Stop) -> Ended:
        try:
            instruction = await instruction_of(event, self._bus)
        except BusError as error:
            failure = Failure(
                kind=FailureKind.INFRA,
                message=f"the instruction cannot be fetched: {error}",
                retryable=error.retryable,
                stage=Stage.RUNNING,
            )
            return Ended(Ending(ExitReport(reason="failed"), failure), ran=False)
        return await execute(event, box, instruction, self._model(event), key, log_file, stop, self._settings)

    def _model(self, event: SessionAssigned) -> str:
        """What the harness calls the model."""
        return event.task.agent.model_name or self._settings.model_name

    async def _keep(
        self, event: SessionAssigned, box: Box, ending: Ending, key: str, log_file: Path, stop: Stop, kept: Kept
    ) -> None:
        """The harness's log always; the agent's files where somebody will look at them."""
        settings = self._settings
        limits = Limits(settings.artifact_bytes, settings.artifacts_total_bytes, settings.artifacts_count)
        graded = ending.exit.reason in ("exited", "timeout")
        with contextlib.suppress(Stopped):  # the attempt has ended as it has; its files no longer matter
            try:
                await keep_log(log_file, key, self._bus, kept)
            except BusError as error:
                kept.leave_out("logs/harness.log", str(error))
            if graded:
                place = workspace(box.session_dir, event.task.runtime.workdir)
                folders = (
                    Folder(f"{box.session_dir}/logs", "logs/", ("**",)),
                    Folder(f"{box.session_dir}/artifacts", "artifacts/", ("**",)),
                    Folder(place, "", tuple(event.task.artifacts)),
                )
                await stop.unless(collect(box, folders, self._bus, limits, kept, settings.collect_timeout_s))

    # the end

    async def crashed(self, assignment_id: str, error: Exception) -> None:
        """A worker failed in a way nobody foresaw: the attempt ends, and another one may do better."""
        row = await self._books.row(assignment_id)
        if row is None or row.ended:
            return
        with contextlib.suppress(RuntimeFailure):
            if (box := await self._boxes.find(row)) is not None:
                await box.kill_all()
        failure = Failure(
            kind=FailureKind.INFRA,
            message=f"the gateway failed: {type(error).__name__}: {error}",
            retryable=True,
            stage=row.stage,
        )
        await self._end(assignment_id, Ending(ExitReport(reason="failed"), failure))

    async def _end(
        self,
        assignment_id: str,
        ending: Ending,
        *,
        died_ms: int | None = None,
        kept: Kept | None = None,
        timing_ms: Mapping[str, float] | None = None,
    ) -> None:
        now_ms = died_ms if died_ms is not None else self._clock.now_ms()
        step = await self._books.step(
            assignment_id,
            lambda row: machine.ended(
                row, now_ms, ending, artifacts=kept.artifacts if kept else (), timing_ms=timing_ms
            ),
        )
        if step is not None:
            await self._after(step)

    async def _after(self, step: Step) -> None:
        """An attempt has ended: count it, and take its box away where nobody needs it."""
        value = step.messages[0].value if step.messages else None
        exit_ = getattr(value, "exit", None)
        failure = getattr(value, "failure", None)
        reason = exit_.reason if exit_ is not None else "?"
        self._metrics.ended.labels(reason=reason, failure=failure.kind if failure else "none").inc()
        log.info(
            "ended",
            reason=reason,
            exit_code=exit_.exit_code if exit_ else None,
            failure=failure.message if failure else None,
        )
        await self.tidy(step.row)

    async def tidy(self, row: Row) -> None:
        """Destroy the box of an ended attempt that nobody needs, and strike a released one off the books.

        What fails is left to the reaper.
        """
        if not row.ended or not (row.released or not row.box_kept):
            return
        try:
            await self._boxes.destroy(row)
        except RuntimeFailure as error:
            log.warning("the box could not be destroyed; will try again", box=row.box_id, error=str(error))
            return
        if row.released:
            await asyncio.to_thread(self._log(row.assignment_id).unlink, missing_ok=True)
            await self._books.remove(row.assignment_id)

    def _log(self, assignment_id: str) -> Path:
        """Where the harness's output goes while it runs."""
        return self._logs / f"{derived('log', assignment_id)}.log"  # ids of others never become paths

    async def teardown(self, assignment_id: str, stop: Stop) -> None:
        """`tidy`, as a pool's work."""
        row = await self._books.row(assignment_id)
        if row is not None:
            await self.tidy(row)


def _failed_ending(error: AttemptFailed) -> Ending:
    report = ExitReport(reason="failed", exit_code=error.exit_code, output_tail=error.output_tail)
    return Ending(report, error.failure)
