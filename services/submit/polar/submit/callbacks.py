"""Tells a task's `callback_url` that the task has ended.

Promises:
- At least once, for every task with a `callback_url` whose end the log holds: to a receiver that answers 2xx within
  `callback_attempts` tries of one process's life, or of the next one's if that starts within `callback_memory_s`.
- Rarely twice: after a crash between the receiver's answer and our note of it, or when another process takes the
  scheduler over within `callback_memory_s`. `Idempotency-Key` is the same each time.
- A receiver that says no (4xx but 408, 425 and 429, or a redirect elsewhere) is not asked again.
- One slow or dead receiver delays no other one's callback, up to `callback_open` waiting ones.

Nothing is produced: what is due follows from `results`, as the view has them, and is asked of it at each start.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    stop_after_attempt,
    stop_never,
    wait_random_exponential,
)
from yarl import URL

from polar.bus import Bus, BusError, Record
from polar.schemas import TaskRequest
from polar.schemas.validation import Refused, parse

from .documents import task_chunks, task_json
from .entries import Change, Settled, TaskEntry
from .metrics import SubmitMetrics
from .sent import SentFile
from .settings import SubmitSettings
from .view import View
from .viewlock import ViewBroken

MAX_REDIRECTS = 3
TRY_AGAIN = frozenset({408, 425, 429})

log = structlog.get_logger("polar.submit.callbacks")


class CallbackRefused(Exception):
    """The receiver said no, and would again."""


class CallbackFailed(Exception):
    """No answer, or one that means later."""


class Callbacks:
    """Fed by `tell`; `run` sends until it is cancelled, and only while `leading` is set."""

    def __init__(
        self,
        bus: Bus,
        view: View,
        settings: SubmitSettings,
        metrics: SubmitMetrics,
        sent: SentFile,
        leading: asyncio.Event,
    ) -> None:
        self._bus = bus
        self._view = view
        self._settings = settings
        self._metrics = metrics
        self._file = sent
        self._leading = leading
        self._due: dict[str, None] = {}
        """Ended tasks not looked at yet, oldest first; never more than the view keeps tasks."""
        self._sent: dict[str, None] = {}
        """Delivered by an earlier process, or begun by this one: a view that is built anew tells every ending again."""
        self._open = 0
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(settings.callback_concurrency)
        self._writing = asyncio.Lock()

    def tell(self, change: Change) -> None:
        if isinstance(change, Settled):
            self._due[change.task_id] = None
            while len(self._due) > self._settings.max_tasks:
                lost = next(iter(self._due))
                del self._due[lost]
                self._ended("unknown", lost, "more tasks ended than this process keeps (POLAR_SUBMIT_MAX_TASKS)")
            self._wake.set()

    async def run(self) -> None:
        self._sent = dict.fromkeys(await asyncio.to_thread(self._file.load, self._horizon_ms()))
        # what ended before this process, or before its view could tell of it, comes first
        self._due = {**dict.fromkeys(await self._ended_before()), **self._due}
        timeout = aiohttp.ClientTimeout(total=self._settings.callback_timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http, asyncio.TaskGroup() as group:
            while True:
                await self._leading.wait()
                while self._due and self._open < self._settings.callback_open:
                    task_id = next(iter(self._due))
                    del self._due[task_id]
                    task = await self._task(task_id)
                    if task is None:
                        self._ended("unknown", task_id, "the task was forgotten before its callback could be sent")
                    elif self._wanted(task):
                        self._open += 1
                        self._begin(_key(task))
                        group.create_task(self._deliver(http, task), name=f"callback {task_id}")
                self._wake.clear()
                if not self._due or self._open >= self._settings.callback_open:
                    await self._wake.wait()

    def _begin(self, key: str) -> None:
        self._sent[key] = None
        while len(self._sent) > 2 * self._settings.max_tasks:
            del self._sent[next(iter(self._sent))]

    async def _ended_before(self) -> list[str]:
        try:
            return await self._view.ended_since(self._horizon_ms(), self._settings.max_tasks)
        except ViewBroken:
            return []  # it is built anew, and tells of every ending again

    async def _task(self, task_id: str) -> TaskEntry | None:
        try:
            return await self._view.task(task_id)
        except ViewBroken:
            return None  # as above

    def _horizon_ms(self) -> int:
        return self._bus.clock.now_ms() - round(self._settings.callback_memory_s * 1000)

    def _wanted(self, task: TaskEntry) -> bool:
        if task.result is None:
            return False  # its id has just been used again
        return task.result.at_ms >= self._horizon_ms() and _key(task) not in self._sent

    async def _deliver(self, http: aiohttp.ClientSession, task: TaskEntry) -> None:
        try:
            # the log is waited for as long as it takes, the receiver is not
            url: URL | None = await self._retrying(BusError, None)(self._url_of, task)
            if url is None:
                return
            await self._retrying(CallbackFailed, self._settings.callback_attempts)(self._send, http, url, task)
        except BusError as error:
            self._ended("unknown", task.task_id, f"the task's record cannot be read: {error}")
        except CallbackRefused as error:
            await self._note(task)
            self._ended("refused", task.task_id, str(error))
        except CallbackFailed as error:
            self._ended("given_up", task.task_id, f"{error}; tried {self._settings.callback_attempts} times")
        except Exception:
            log.exception("a callback failed", task_id=task.task_id)
            self._metrics.callbacks.labels("given_up").inc()
        else:
            await self._note(task)
            self._ended("delivered", task.task_id, None)
        finally:
            self._open -= 1
            self._wake.set()

    def _retrying(self, kind: type[Exception], attempts: int | None) -> AsyncRetrying:
        def worth_it(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            return isinstance(error, kind) and getattr(error, "retryable", True)

        return AsyncRetrying(
            sleep=self._bus.clock.sleep,
            retry=worth_it,
            stop=stop_never if attempts is None else stop_after_attempt(attempts),
            wait=wait_random_exponential(
                multiplier=self._settings.callback_backoff_s, max=self._settings.callback_backoff_max_s
            ),
            reraise=True,
        )

    async def _url_of(self, task: TaskEntry) -> URL | None:
        """Where the task's own record says to report to."""
        if task.accepted is None:
            return None
        request = request_of(await self._bus.lookup(task.accepted.source))
        if request is None or request.callback_url is None:
            return None
        try:
            return URL(request.callback_url)
        except ValueError as error:
            raise CallbackRefused(f"callback_url is no URL: {error}") from None

    async def _send(self, http: aiohttp.ClientSession, url: URL, task: TaskEntry) -> None:
        async with self._slots:
            self._metrics.callback_tries.inc()
            try:
                for _ in range(MAX_REDIRECTS + 1):
                    further = await self._post(http, url, task)
                    if further is None:
                        return
                    url = further
            except ValueError as error:
                raise CallbackRefused(f"callback_url, or where it redirects to, is no URL to ask: {error}") from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise CallbackFailed(f"{url.host}: {type(error).__name__}: {error}") from None
            raise CallbackRefused(f"{url.host} redirects more than {MAX_REDIRECTS} times")

    async def _post(self, http: aiohttp.ClientSession, url: URL, task: TaskEntry) -> URL | None:
        """One request. Returns where it was redirected to on the same host, None when it was taken."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": _key(task), "User-Agent": "polar"}
        # the body goes to the address in the task only: a redirect elsewhere could be anyone's
        body = task_chunks(self._bus, task) if self._settings.callback_trajectories else await task_json(task)
        async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
            status = response.status
            if 200 <= status < 300:
                return None
            if status in (307, 308):
                further = url.join(URL(response.headers.get("Location", "")))
                if further.origin() != url.origin():
                    raise CallbackRefused(f"{url.host} redirects to another host, which is not followed")
                return further
            if status in TRY_AGAIN or status >= 500:
                raise CallbackFailed(f"{url.host} answered {status}")
            raise CallbackRefused(f"{url.host} answered {status}")

    async def _note(self, task: TaskEntry) -> None:
        key = _key(task)
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.note, key, self._bus.clock.now_ms())
            except OSError as error:
                log.warning("a delivered callback could not be noted; a restart will send it again", error=str(error))

    def _ended(self, outcome: str, task_id: str, reason: str | None) -> None:
        self._metrics.callbacks.labels(outcome).inc()
        if reason is None:
            log.info("callback delivered", task_id=task_id)
        else:
            log.warning("callback not delivered", task_id=task_id, outcome=outcome, reason=reason)


def request_of(record: Record) -> TaskRequest | None:
    """The task in a record of `tasks`, whoever wrote it."""
    if isinstance(record.value, TaskRequest):
        return record.value
    try:
        request: Any = parse(record.raw or b"")
    except Refused:
        return None
    return request if isinstance(request, TaskRequest) else None


def _key(task: TaskEntry) -> str:
    """The same for the same ending of the same task; a task id may be used again after a week."""
    assert task.result is not None
    return f"{task.task_id}/{task.result.at_ms}"
