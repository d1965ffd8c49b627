"""The scripted engine: an HTTP server that speaks vLLM's chat API and answers from a script.

For tests of everything that talks to an engine, without a model: answers, tool calls, errors, delays and broken
connections are written down; token ids come from a real tokenizer, so a prompt is rendered and counted as a real
engine would; the log-probabilities are made up, but the same for the same prompt ids, position and id. It holds no
weights and samples nothing.

    async with ScriptedEngine(Script.say("Hello.")) as engine:
        ... engine.base_url, then assert on engine.calls and engine.stats
"""

import asyncio
import math
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

from . import sglang
from .chat import ChatTokenizer
from .choice import Burst, Sampled
from .engine import Call, Disconnect, Generation
from .errors import ApiError
from .lifecycle import Stats
from .script import Reply, Script, View, digest, reply_text
from .server import EngineServer
from .tamper import DAMAGES

Json = dict[str, Any]
_MASK = 2**64 - 1
PROBE = "polar-self-test"
"""What the id of a client's question begins with that only wants to see how this engine answers."""
PROBED = Reply(text="Yes.")
DEV_ROUTES = (
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/weight_info",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
)


@dataclass(slots=True)
class Recorded:
    """A call as it was asked and answered. `outcome` is None while it runs: finished, aborted or failed after."""

    id: str
    body: Json
    headers: dict[str, str]
    prompt_ids: list[int]
    key: str = ""
    call: int = 0
    turn: int = 0
    rule: str = ""
    tokens_in: bool = False
    """It came as tokens; `body` is then the chat request that was rendered under the same id, where one was."""
    outcome: str | None = None
    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    """Per choice, what was sampled until the call ended, whether or not its client saw it."""


@dataclass(slots=True)
class _Plan:
    view: View
    reply: Reply
    record: Recorded


class ScriptedBackend:
    """Turns a script's replies into sampled tokens."""

    def __init__(
        self,
        script: Script,
        chat: ChatTokenizer | None,
        *,
        model: str,
        max_model_len: int,
        reasoning: bool,
        raw_logprobs: bool,
        keep: int,
        probe: Reply | None,
        kind: str,
    ) -> None:
        self.script = script
        self.probe = probe
        self.probed = 0
        """Probes answered so far."""
        self.kind = kind
        self.chat: ChatTokenizer
        self._given = chat
        self.model = model
        self.max_model_len = max_model_len
        self.reasoning = reasoning
        self._raw = raw_logprobs
        self.calls: deque[Recorded] = deque(maxlen=keep)
        self.gates: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Load the bundled tokenizer, where no other was given: from a file, so not on the loop."""
        self.chat = await asyncio.to_thread(ChatTokenizer.small) if self._given is None else self._given

    async def close(self) -> None:
        """Nothing to free."""

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def prepare(self, call: Call) -> None:
        body = dict(call.request.body) if call.request else call.tokens.body if call.tokens else {}
        if self.kind == "sglang":
            sglang.refuse_stream(call)
        probe = self.probe if self.is_probe(call) else None
        if probe is None:
            view = self.script.view(body, call.headers, call.prompt_ids)
            rule, reply = self.script.reply(view)
        else:
            self.probed += 1
            view, rule, reply = View(body, call.headers, call.prompt_ids, "", 0, 0), "probe", probe
        if reply.damage is not None and reply.damage not in DAMAGES:
            raise ApiError(f"the script names the damage {reply.damage!r}; there are {', '.join(DAMAGES)}", status=500)
        call.tamper = DAMAGES[reply.damage] if reply.damage else None
        record = Recorded(call.id, body, dict(call.headers), call.prompt_ids, view.key, view.call, view.turn, rule)
        record.tokens_in = call.tokens is not None
        call.plan = _Plan(view, reply, record)
        if probe is None:
            self.calls.append(record)
        if reply.gate is not None and reply.gate_after == 0:
            await self.gate(reply.gate).wait()
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.error is not None and reply.error.after is None:
            raise _refusal(reply)
        if reply.disconnect_after == 0:
            raise Disconnect(reset=reply.reset)

    def is_probe(self, call: Call) -> bool:
        """Whether `call` is answered aside from the script."""
        return self.probe is not None and call.id.startswith(PROBE)

    async def generate(self, call: Call, index: int) -> AsyncGenerator[Burst, None]:
        plan: _Plan = call.plan
        reply = plan.reply
        ids = self.sample(reply, plan.view, (call.sampling.seed or 0) + index)
        temperature = 1.0 if self._raw else call.sampling.temperature
        logprobs = made_up_logprobs(call.prompt_ids, ids, temperature)
        if reply.logprob is not None:
            logprobs = [reply.logprob] * len(ids)
        breaks = _breaks(reply, len(ids))
        if reply.first_delay:
            await asyncio.sleep(reply.first_delay)
        at = 0
        while True:
            await self._happen(reply, at)
            if at >= len(ids):
                break
            until = min(end for end in breaks if end > at)
            tokens = [self._sampled(call, at + i, ids[at + i], logprobs[at + i]) for i in range(until - at)]
            at = until
            last = at == len(ids) and not self._happens_at(reply, at)
            finish = reply.finish if last and reply.finish != "stop" else None
            yield Burst(tokens, finish, reply.stop_reason if finish else None, _version(reply, at - 1))
            if reply.chunk_delay and at < len(ids):
                await asyncio.sleep(reply.chunk_delay)
        # reached when no token ended the turn: an empty reply, or ids without an end-of-turn token
        yield Burst((), reply.finish, reply.stop_reason)

    def sample(self, reply: Reply, view: View, seed: int) -> list[int]:
        """The ids of one choice."""
        if reply.ids is not None:
            return list(reply.ids)
        ids = self.chat.encode(reply_text(reply, view, seed))
        for turn in range(int(reply.drift)):
            splits = [(i, pair) for i, token in enumerate(ids) if (pair := self.chat.split(token)) is not None]
            if not splits:
                break
            at, pair = splits[digest(view.prompt_ids, seed + turn) % len(splits)]
            ids[at : at + 1] = pair
        return [*ids, self.chat.eos_id] if reply.finish == "stop" else ids

    async def _happen(self, reply: Reply, at: int) -> None:
        """What the script wants after `at` tokens."""
        if reply.gate is not None and reply.gate_after == at and at > 0:
            await self.gate(reply.gate).wait()
        if reply.error is not None and reply.error.after == at:
            raise _refusal(reply)
        if reply.disconnect_after == at:
            raise Disconnect(reset=reply.reset)

    def _happens_at(self, reply: Reply, at: int) -> bool:
        after = None if reply.error is None else reply.error.after
        return at in (after, reply.disconnect_after, reply.gate_after if reply.gate else None)

    def _sampled(self, call: Call, position: int, token: int, logprob: float) -> Sampled:
        count = call.sampling.top_logprobs or 0
        if count == 0:
            return Sampled(token, logprob)
        others = [(token + 1 + i * 7) % self.chat.vocabulary for i in range(count)]
        # less likely than the sampled one, so that it stays the first of the list
        top = [(token, logprob), *((other, _f32(logprob - 1.0 - 0.5 * i)) for i, other in enumerate(others))]
        return Sampled(token, logprob, tuple(top[:count]))


def _refusal(reply: Reply) -> ApiError:
    error = reply.error
    assert error is not None
    return ApiError(error.message, status=error.status, type=error.type, param=error.param, headers=dict(error.headers))


def _breaks(reply: Reply, count: int) -> list[int]:
    """Numbers of tokens after which a chunk ends."""
    size = max(1, reply.tokens_per_chunk)
    marks = {*range(size, count, size), count}
    wanted = (reply.error.after if reply.error else None, reply.disconnect_after, reply.gate_after)
    marks.update(mark for mark in wanted if mark and mark < count)
    boundary = 0
    for _, tokens in reply.versions[:-1]:
        boundary += tokens
        if boundary < count:
            marks.add(boundary)
    return sorted(marks)


def _version(reply: Reply, position: int) -> str | None:
    for version, size in reply.versions:
        if position < size:
            return version
        position -= size
    return reply.versions[-1][0] if reply.versions else None


def _f32(value: float) -> float:
    """The nearest float32: what an engine can tell, and what a client may store without loss."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def made_up_logprobs(prompt_ids: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Negative log-probabilities of `ids` after `prompt_ids`: exact in float32, the same on every machine.

    Each depends on the prompt, the position and the id, and on nothing else; most are near 0, as a model's are. A lower
    temperature brings them nearer, as processed ones; 0 tells them as before temperature, as vLLM does.
    """
    scale = temperature or 1.0
    start = digest(prompt_ids)
    values = []
    for position, token in enumerate(ids):
        mixed = (start ^ (position * 0x9E3779B97F4A7C15) ^ (token * 0xC2B2AE3D27D4EB4F)) & _MASK
        # the finaliser of splitmix64: every bit of the mixture moves every bit of the result
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        share = ((mixed ^ (mixed >> 31)) + 1) / 2**64
        values.append(min(-4.0 * math.pow(share, 3) * scale, -1e-6))
    return [_f32(value) for value in values]


class ScriptedEngine(EngineServer):
    """The server. `tokenizer` is the bundled one by default; any byte-level `tokenizer.json` will do.

    `raw_logprobs` behaves as vLLM's `--logprobs-mode raw_logprobs`: log-probabilities that no temperature changes.
    `calls` holds the last `keep` requests; `stats` counts them; `until` waits for a state instead of sleeping. `probe`
    answers requests whose id begins with `polar-self-test`, aside from the script, the calls and the counts; None: they
    are as any other. `kind` "sglang": SGLang's fields and routes in place of vLLM's, see `sglang.py`.
    `dev_mode` False: no routes of pauses and weights, as vLLM without VLLM_SERVER_DEV_MODE.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        model: str = "scripted",
        max_model_len: int = 131_072,
        reasoning: bool = False,
        raw_logprobs: bool = False,
        keep: int = 10_000,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        any_model: bool = False,
        refuse_when_paused: bool = False,
        scale_out: bool = True,
        probe: Reply | None = PROBED,
        kind: Literal["vllm", "sglang"] = "vllm",
        dev_mode: bool = True,
    ) -> None:
        self.kind = kind
        self.dev_mode = dev_mode
        self.scripted = ScriptedBackend(
            script or Script(),
            tokenizer,
            model=model,
            max_model_len=max_model_len,
            reasoning=reasoning,
            raw_logprobs=raw_logprobs,
            keep=keep,
            probe=probe,
            kind=kind,
        )
        super().__init__(
            self.scripted,
            host=host,
            port=port,
            api_key=api_key,
            any_model=any_model,
            refuse_when_paused=refuse_when_paused,
            scale_out=scale_out,
        )
        self.owner = kind

    async def __aenter__(self) -> "ScriptedEngine":
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, at)

    @property
    def calls(self) -> list[Recorded]:
        """The requests that got past validation, oldest first."""
        return list(self.scripted.calls)

    @property
    def stats(self) -> Stats:
        return self.lifecycle.stats

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The engine's tokenizer, once it has started."""
        return self.scripted.chat

    def forget(self) -> None:
        """Start over after a client's warm-up: no calls recorded, no rule hit, no call counted."""
        self.scripted.calls.clear()
        self.scripted.script.forget()

    def open(self, gate: str) -> None:
        """Let every reply that waits at `gate`, now and later, go on."""
        self.scripted.gate(gate).set()

    def close_gate(self, gate: str) -> None:
        """Make replies wait at `gate` again."""
        self.scripted.gate(gate).clear()

    async def until(self, holds: Callable[[Stats], bool], timeout: float = 10.0) -> None:
        """Wait until the stats satisfy `holds`. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            await self.lifecycle.until(lambda: holds(self.stats))

    def is_aside(self, call: Call) -> bool:
        return self.scripted.is_probe(call)

    def shaped(self, body: Json, generation: Generation) -> Json:
        return sglang.answer(body, generation.call, generation.choices) if self.kind == "sglang" else body

    def told_error(self, error: ApiError) -> Json:
        return sglang.error(error) if self.kind == "sglang" else error.body()

    def routes(self) -> list[web.RouteDef]:
        if self.kind != "sglang":
            return [one for one in super().routes() if self.dev_mode or one.path not in DEV_ROUTES]
        return [
            *(route for route in super().routes() if route.path not in sglang.NOT_ITS),
            web.get("/server_info", self._server_info),
            web.get("/model_info", self._model_info),
            web.post("/pause_generation", self._pause_generation),
            web.post("/continue_generation", self._continue_generation),
            web.post("/update_weight_version", self._sglang_version),
        ]

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({"version": sglang.VERSION})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"model_path": self.scripted.model, "weight_version": self.lifecycle.version})

    async def _pause_generation(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort") if http.can_read_body else "abort"
        await self.lifecycle.pause({"in_place": "keep", "retract": "keep"}.get(mode, mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, http: web.Request) -> web.Response:
        self.lifecycle.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _sglang_version(self, http: web.Request) -> web.Response:
        self.lifecycle.version = str((await http.json())["new_version"])
        return web.json_response({"success": True, "new_version": self.lifecycle.version})

    def on_end(self, call: Call, generation: Generation, outcome: str) -> None:
        if call.plan is None:
            return
        record: Recorded = call.plan.record
        record.outcome = outcome
        record.ids = [list(choice.ids) for choice in generation.choices]
        record.logprobs = [[entry["logprob"] for entry in choice.entries] for choice in generation.choices]

    def more_routes(self) -> list[web.RouteDef]:
        """For a script in another process: open a gate, read the calls."""
        return [web.post("/script/gates/{name}", self._open_gate), web.get("/script/calls", self._told)]

    async def _open_gate(self, http: web.Request) -> web.Response:
        self.open(http.match_info["name"])
        return web.json_response({"open": http.match_info["name"]})

    async def _told(self, http: web.Request) -> web.Response:
        shown = ("id", "prompt_ids", "key", "call", "turn", "rule", "outcome", "ids", "logprobs", "body")
        calls = [{name: getattr(record, name) for name in shown} for record in self.scripted.calls]
        counts = {name: getattr(self.stats, name) for name in Stats.__slots__}
        return web.json_response({"stats": counts, "calls": calls})
