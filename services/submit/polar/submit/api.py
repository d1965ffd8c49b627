"""The HTTP API: upstream Polar's paths and names; every refusal is JSON that says field and reason (`errors.py`).

What it promises: a task that was answered with 200 is on the log and accepted; one answered with 503 may or may not be
(the answer holds its id, and sending the same body with that id again is harmless). It decides nothing: the scheduler's
record in `stages` is the answer. It asks for no password: bind it where only friends reach it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from polar.bus import Bus, BusError, Out, RecordTooLarge
from polar.schemas import (
    CancelRequest,
    Event,
    Problem,
    RecordRef,
    TaskAccepted,
    TaskRejected,
    TaskRequest,
    to_builtins,
    to_json_bytes,
)
from polar.schemas.ids import id_problem
from polar.schemas.validation import Limits, Refused, check, parse
from polar.service.randomness import Randomness, new_id

from .documents import (
    nodes_document,
    rejected_document,
    session_document,
    status_document,
    task_chunks,
    task_json,
    task_line,
)
from .entries import TaskEntry
from .errors import (
    ApiError,
    Busy,
    Conflict,
    Invalid,
    NotFound,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
    error_response,
    http_error_response,
)
from .events import EventHub
from .metrics import SubmitMetrics
from .queries import flag_of, seconds_of, task_filter, text_of
from .settings import SubmitSettings
from .sse import follow
from .view import View
from .viewlock import ViewBroken
from .waiting import TooManyWaiting, Waiters

THREAD_BYTES = 128 * 1024
BUSY_RETRY_S = 30
"""Seconds: sessions end by the minute, not by the second."""
"""A larger body is parsed in a thread: json takes about 10 ms per MB, and the checks as much again."""

log = structlog.get_logger("polar.submit.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(
        self,
        bus: Bus,
        view: View,
        waiters: Waiters,
        hub: EventHub,
        settings: SubmitSettings,
        metrics: SubmitMetrics,
        randomness: Randomness,
    ) -> None:
        """`bus`: of service `submit`, started."""
        self._bus = bus
        self._view = view
        self._waiters = waiters
        self._hub = hub
        self._settings = settings
        self._limits = settings.limits()
        self._metrics = metrics
        self._randomness = randomness

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/rollout/task/submit", self.submit),
                web.get("/rollout/task/{task_id}", self.task),
                web.delete("/rollout/task/{task_id}", self.cancel),
                web.post("/rollout/task/{task_id}/cancel", self.cancel),
                web.get("/rollout/status", self.status),
                web.get("/nodes", self.nodes),
                web.get("/tasks", self.tasks),
                web.get("/tasks/{task_id}/sessions", self.sessions),
                web.get("/events", self.events),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.prometheus),
            ]
        )
        return app

    # --- asking for something ---

    async def submit(self, request: web.Request) -> web.StreamResponse:
        data = await _json_body(request)
        try:
            if len(data) > THREAD_BYTES:
                task = await asyncio.to_thread(read_task, data, self._limits)
            else:
                task = read_task(data, self._limits)
        except Refused as refused:
            extra = {"task_id": refused.task_id} if refused.task_id else None
            raise Invalid(f"the task was not taken: {refused}", refused.problems, extra=extra) from None
        if task.task_id is None:
            task = msgspec.structs.replace(task, task_id=new_id(self._bus.clock, self._randomness))
        assert task.task_id is not None
        began = self._bus.clock.monotonic()
        ref = await self._publish(task.task_id, task)
        answer = await self._answer(ref, task.task_id)
        self._metrics.accept_seconds.observe(self._bus.clock.monotonic() - began)
        if isinstance(answer, TaskRejected):
            raise _rejection(answer, task.task_id)
        known = await self._view.task(answer.task_id)
        return _json(
            {
                "task_id": answer.task_id,
                "status": known.status if known is not None else "running",
                "session_ids": answer.sessions or list(known.sessions if known is not None else ()),
                "group_id": answer.group_id,
                "warnings": to_builtins(answer.warnings),
            }
        )

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        task_id = _task_id(request)
        task = await self._view.task(task_id)
        if (task is None or not task.known) and self._view.ready:
            raise NotFound(f"no task `{task_id}` is known", extra={"task_id": task_id})
        session_id, reason = await _cancel_body(request)
        if task is not None and session_id is not None and session_id not in task.sessions:
            raise Invalid.field("session_id", f"`{session_id}` is no session of task `{task_id}`", "unknown_name")
        if task is not None and task.settled:
            return _json({"task_id": task_id, "status": task.status, "session_id": session_id, "cancelling": False})
        cancel = CancelRequest(task_id=task_id, session_id=session_id)
        if reason is not None:
            cancel = msgspec.structs.replace(cancel, reason=reason)
        await self._publish(task_id, cancel)
        return _json(
            {"task_id": task_id, "status": "running", "session_id": session_id, "cancelling": True}, status=202
        )

    async def _publish(self, task_id: str, event: Event) -> RecordRef:
        """Write a request to `tasks`; a long instruction goes to the blob store first."""
        try:
            self._waiters.reserve()
            if isinstance(event, TaskRequest) and isinstance(event.instruction, str):
                text = event.instruction.encode()
                if len(text) > self._settings.inline_instruction_bytes:
                    claim = await self._bus.blobs.put(text, "text/plain; charset=utf-8")
                    event = msgspec.structs.replace(event, instruction=claim)
            (ref,) = await self._bus.send(Out("tasks", task_id, event))
        except TooManyWaiting as error:
            raise Unavailable(str(error)) from None
        except RecordTooLarge as error:
            raise TooLarge(
                f"the task takes {error.size} bytes besides its instruction and a record holds {error.limit}; "
                "move files out of `runtime.prepare` and `metadata`"
            ) from None
        except BusError as error:
            raise Unavailable(
                f"the log cannot be written now; the same body with this id may be sent again: {error}",
                retry_after_s=5,
                extra={"task_id": task_id},
            ) from None
        return ref

    async def _answer(self, ref: RecordRef, task_id: str) -> TaskAccepted | TaskRejected:
        try:
            answer = await self._waiters.answer(ref, self._settings.accept_timeout_s)
        except TooManyWaiting as error:
            raise Unavailable(str(error), extra={"task_id": task_id}) from None
        if answer is None:
            raise Unavailable(
                "the task is on the log and the scheduler has not answered yet; "
                f"ask GET /rollout/task/{task_id}, or send the same body with this id again",
                retry_after_s=5,
                extra={"task_id": task_id},
            )
        return answer

    # --- looking ---

    async def task(self, request: web.Request) -> web.StreamResponse:
        task_id = _task_id(request)
        wait_s = min(seconds_of(request, "wait", 0.0), self._settings.max_wait_s)
        whole = flag_of(request, "trajectories")
        task = await self._known(task_id)
        if isinstance(task, TaskRejected):
            return _json(rejected_document(task))
        if wait_s > 0 and not task.settled:
            try:
                await self._waiters.settled(task_id, wait_s)
            except TooManyWaiting as error:
                raise Unavailable(str(error)) from None
            # it may have been accepted anew or forgotten meanwhile
            task = await self._view.task(task_id) or task
        if not whole:
            return web.Response(body=await task_json(task), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async for chunk in task_chunks(self._bus, task):
            await response.write(chunk)
        await response.write_eof()
        return response

    async def sessions(self, request: web.Request) -> web.StreamResponse:
        task_id = _task_id(request)
        task = await self._known(task_id)
        entries = [] if isinstance(task, TaskRejected) else list(task.sessions.values())
        return _json({"task_id": task_id, "sessions": [session_document(one) for one in entries]})

    async def tasks(self, request: web.Request) -> web.StreamResponse:
        found = await self._view.select(task_filter(request))
        return _json({"tasks": [task_line(one) for one in found.tasks], "more": found.more})

    async def status(self, request: web.Request) -> web.StreamResponse:
        return _json(status_document(self._view, await self._view.statuses()))

    async def nodes(self, request: web.Request) -> web.StreamResponse:
        return _json(nodes_document(self._view))

    async def events(self, request: web.Request) -> web.StreamResponse:
        return await follow(request, self._hub, self._settings, self._metrics)

    async def health(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        if not self._view.ready:
            return _json({"status": "not ready", "reason": "the view is still reading the log"}, status=503)
        return _json({"status": "ready"})

    async def prometheus(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _known(self, task_id: str) -> TaskEntry | TaskRejected:
        task = await self._view.task(task_id)
        if task is not None and task.known:
            return task
        rejected = await self._view.rejected(task_id)
        if rejected is not None:
            return rejected
        if not self._view.ready:
            raise Unavailable("the log is still being read; the task may be known in a moment")
        raise NotFound(f"no task `{task_id}` is known", extra={"task_id": task_id})

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Everything that is refused or fails becomes JSON, and is counted."""
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except ViewBroken as error:
            response = Unavailable(str(error), retry_after_s=5).response()
        except web.HTTPException as error:
            response = http_error_response(error)
        except ConnectionResetError:
            raise  # the client is gone
        except Exception:
            log.exception("a request failed", method=request.method, path=request.path)
            response = error_response(500, "internal", "this is a bug in polar; the log of the process has the details")
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unmatched"
            # 499: nobody was there to be answered
            self._metrics.requests.labels(route, "499" if response is None else str(response.status)).inc()
        return response


def read_task(data: bytes, limits: Limits) -> TaskRequest:
    """The task of a request body, checked but as it was written: the scheduler resolves aliases and networks, so that
    the same body is the same task by HTTP and by Kafka.

    Raises:
        Refused: with field and reason.
    """
    request = parse(data)
    if not isinstance(request, TaskRequest):
        message = "a task is submitted here; cancel one with POST /rollout/task/{id}/cancel"
        raise Refused([Problem(field="type", message=message)], request.task_id)
    check(request, limits)
    return request


def _rejection(answer: TaskRejected, task_id: str) -> ApiError:
    extra = {"task_id": task_id}
    message = "; ".join(f"{one.field or 'task'}: {one.message}" for one in answer.problems)
    if any(one.code == "conflict" for one in answer.problems):
        return Conflict(message, answer.problems, extra=extra)
    if any(one.code == "busy" for one in answer.problems):
        return Busy(message, answer.problems, retry_after_s=BUSY_RETRY_S, extra=extra)
    return Invalid(f"the task was not taken: {message}", answer.problems, extra=extra)


async def _json_body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        raise UnsupportedMedia(
            f"the body is `{request.content_type}`; send JSON with `Content-Type: application/json`",
            [Problem(field="Content-Type", message="must be application/json")],
        )
    return await request.read()


async def _cancel_body(request: web.Request) -> tuple[str | None, str | None]:
    """Session id and reason out of an optional body."""
    if not request.can_read_body:
        return None, None
    data = await _json_body(request)
    if not data.strip():
        return None, None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Invalid.field("", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Invalid.field("", f"expected an object, got {type(body).__name__}")
    unknown = [
        Problem(field=one, message="is not a field here", code="unknown_field")
        for one in body
        if one not in ("session_id", "reason")
    ]
    if unknown:
        raise Invalid("the cancel has fields that mean nothing here", unknown)
    for field in ("session_id", "reason"):
        if body.get(field) is not None and not isinstance(body[field], str):
            raise Invalid.field(field, f"expected text, got {type(body[field]).__name__}")
    return body.get("session_id"), text_of(body.get("reason"))


def _task_id(request: web.Request) -> str:
    task_id = request.match_info["task_id"]
    if reason := id_problem(task_id):
        raise Invalid.field("task_id", reason)
    return task_id


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=to_json_bytes(document), content_type="application/json")
