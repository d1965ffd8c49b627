"""`GET /events`: the hub's stream as server-sent events (WHATWG HTML, section 9.2).

`event:` is `stage`, `task_accepted` or `task_rejected` with a JSON object; `gap` where events were missed; `cut` as the
last one, with the reason. Every event but `gap` and `cut` has an `id`.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from polar.schemas import to_json_bytes
from polar.schemas.ids import id_problem

from .documents import event_document
from .errors import Invalid, Unavailable
from .events import Cut, EventHub, Filter, Gap, Told, TooManyWatchers, Watcher
from .metrics import SubmitMetrics
from .queries import only_known
from .settings import SubmitSettings


async def follow(
    request: web.Request, hub: EventHub, settings: SubmitSettings, metrics: SubmitMetrics
) -> web.StreamResponse:
    """Write events until the client leaves, is cut off, or the process stops."""
    only_known(request, ("task_id", "session_id", "last_event_id"))
    wanted = Filter(request.query.get("task_id"), request.query.get("session_id"))
    for name, value in wanted._asdict().items():
        if value is not None and (reason := id_problem(value)):
            raise Invalid.field(name, reason)
    # the header is the browser's, the parameter for whoever cannot set one
    last = request.headers.get("Last-Event-ID") or request.query.get("last_event_id")
    try:
        watcher = hub.watch(wanted, last)
    except TooManyWatchers as error:
        raise Unavailable(str(error), retry_after_s=5) from None
    try:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        # the position at once, so that a client that is cut before the first event can come back without a hole
        await response.write(f"retry: 1000\nid: {watcher.start}\n: connected\n\n".encode())
        await _write_all(request, response, watcher, settings, metrics)
    finally:
        hub.unwatch(watcher)
    return response


async def _write_all(
    request: web.Request,
    response: web.StreamResponse,
    watcher: Watcher,
    settings: SubmitSettings,
    metrics: SubmitMetrics,
) -> None:
    while True:
        try:
            async with asyncio.timeout(settings.event_ping_s):
                item = await watcher.get()
        except TimeoutError:
            item = None
        try:
            async with asyncio.timeout(settings.event_write_timeout_s):
                await response.write(frame(item))
        except TimeoutError:
            # it takes no bytes, so the reason cannot be told either
            metrics.watchers_cut.inc()
            if request.transport is not None:
                request.transport.abort()
            return
        if isinstance(item, Cut):
            if item.code == "slow_client":
                metrics.watchers_cut.inc()
            return


def frame(item: Told | Gap | Cut | None) -> bytes:
    """The bytes of one event; None: a comment that keeps the connection open."""
    match item:
        case None:
            return b": ping\n\n"
        case Gap(message):
            return b"event: gap\ndata: " + to_json_bytes({"message": message}) + b"\n\n"
        case Cut(code, message):
            return b"event: cut\ndata: " + to_json_bytes({"code": code, "message": message}) + b"\n\n"
    document = event_document(item.moved.event)
    head = f"event: {document['type']}\nid: {item.id}\ndata: ".encode()
    return head + to_json_bytes(document) + b"\n\n"
