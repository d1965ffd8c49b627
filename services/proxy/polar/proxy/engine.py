"""The client of one engine: vLLM's OpenAI API, or SGLang's.

Promises: a request leaves with explicit parameters and comes back as a checked `Answer` or as a typed error; cancelling
a call closes its connection at once, which ends the generation in the engine; an engine's error keeps its meaning and
loses what it may quote of a prompt only where it is logged; nothing is captured of an engine that has not proved in its
self-test that it tells ids and log-probabilities of equal length. It knows neither sessions nor Kafka nor dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
from pydantic import SecretStr

from polar.schemas import Engine, LogprobsMode

from .answer import Answer
from .calls import Call, Delta, Json
from .errors import (
    EngineAway,
    EngineBroken,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnfit,
    ModelUnknown,
)
from .events import Events
from .pacing import Pacing
from .placing import LATE, PLAIN, tokenize_body
from .selftest import SELF_TEST, TEMPERATURES, probe, read_mode
from .settings import ProxySettings
from .shapes import SGLANG, SHAPES, VLLM, Shape, cache_salt, refusal, request_body

__all__ = ["Count", "Endpoint", "Events", "Witness", "cache_salt", "refusal", "request_body"]

DONE = b"[DONE]"
ERROR_BODY_BYTES = 64 * 1024
UNFIT_RETRY_AFTER_S = 15.0


class Count(NamedTuple):
    """Tokens of a prompt, and the most that the model takes of prompt and reply together; None: it does not say."""

    tokens: int
    limit: int | None


class Witness(Protocol):
    """Who is told how an engine behaves."""

    def refused(self) -> None:
        """It does not accept a connection."""

    def broke(self) -> None:
        """A connection broke."""

    def answered(self) -> None:
        """It answered a call to its end."""


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None = None


class Endpoint:
    """One engine. `identity` is learned at the first call and again after the engine was away.

    `model`: the name it must serve; None: the first one that it serves.
    """

    def __init__(
        self,
        url: str,
        settings: ProxySettings,
        http: aiohttp.ClientSession,
        *,
        model: str | None,
        kind: str = "auto",
        api_key: SecretStr | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.url = url
        self.root = url.removesuffix("/v1")
        self.max_model_len: int | None = None
        """Tokens of prompt and reply together; None: not known yet."""
        self.shape: Shape = SHAPES.get(kind, VLLM)
        self.engine: Engine | None = None
        """What it is; None: not known (any more)."""
        self.unfit: EngineError | None = None
        """Why no call of it can be captured, as found by the last look at what it is."""
        self.version: str | None = None
        """The last word on its weights: its own, else what a trainer published."""
        self._settings = settings
        self._http = http
        self._model = model
        self._kind = kind
        self._witness = witness
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key.get_secret_value()}"}
        self._has_version = False
        self._has_paused = True
        self._takes_late_system: bool | None = None
        self._learning: asyncio.Task[Engine] | None = None

    # calls ----------------------------------------------------------------------------------------------------------

    @property
    def streams_tokens(self) -> bool:
        """Whether a streamed answer tells what was sampled; known once `identity` is."""
        return self.shape.streams_tokens

    def body(self, call: Call, model: str, sampling: Json, *, tenant: str, version: str | None) -> Json:
        """What is posted for `call`; `version`: the engine's word on its weights, where it has one."""
        salt = cache_salt(tenant, version or self.version)
        return request_body(call, model, sampling, cache_salt=salt, shape=self.shape)

    async def whole(self, body: Json, answer: Answer, *, request_id: str, timeout: float) -> None:
        """Ask for a whole answer and feed it to `answer`."""
        async with self._post(body, request_id, timeout) as response:
            answer.feed(await self._read(response))
        if request_id != SELF_TEST:  # it is asked again after each break, and would hide that every call breaks
            self._answered()

    async def stream(
        self, body: Json, answer: Answer, *, request_id: str, timeout: float
    ) -> AsyncGenerator[list[Delta], None]:
        """Ask for a streamed answer; yields what each read from the network adds.

        Raises:
            EngineFailed: the stream ends before its end.
        """
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        events = Events(self._settings.max_answer_bytes)
        done = False
        silence = self._settings.engine_silence
        async with self._post(body, request_id, timeout, silence=silence) as response:
            pacing = Pacing(response.content, self._settings.stream_step)
            async for data in response.content.iter_any():
                deltas: list[Delta] = []
                for event in events.feed(data):
                    # read on to the end after it, so that the connection can be used again
                    done = done or event == DONE
                    deltas += [] if done else answer.feed(event)
                if deltas:
                    yield deltas
                    await pacing.pause()
        if not done:
            raise EngineFailed("the engine's stream ended before its reply did")
        self._answered()

    async def count(self, call: Call) -> Count:
        """Count the prompt that the engine makes of `call`; images count as their placeholders in the text.

        Raises:
            EngineRefused: as the call itself would be.
            EngineFailed: the engine cannot count.
        """
        return await self._count(tokenize_body(call, (await self.identity()).model))

    async def post(self, path: str, body: Json, *, request_id: str, timeout: float) -> bytes:
        """Post to a path below the engine's root (`/tokenize`); returns the body of its answer.

        Raises:
            EngineError: it is away, refuses or fails.
        """
        async with self._post(body, request_id, timeout, self.root + path) as response:
            return await self._read(response)

    async def _count(self, body: Json) -> Count:
        data = await self.post("/tokenize", body, request_id="polar-count", timeout=self._settings.engine_probe_timeout)
        try:
            told = msgspec.json.decode(data, type=_Tokenized)
        except msgspec.DecodeError:
            raise EngineBroken("the engine's answer to /tokenize is not a count") from None
        return Count(told.count, told.max_model_len)

    async def takes_late_system(self) -> bool:
        """Whether the chat template takes a system message after a user's; yes where that cannot be found out."""
        if self._takes_late_system is None:
            model = (await self.identity()).model
            plain, late = {"model": model, "messages": PLAIN}, {"model": model, "messages": LATE}
            try:
                least = (await self._count(plain)).tokens
            except EngineError:
                return True
            try:
                self._takes_late_system = (await self._count(late)).tokens > least
            except EngineRefused:
                self._takes_late_system = False
            except EngineError:
                return True
        return self._takes_late_system

    @asynccontextmanager
    async def _post(
        self, body: Json | None, request_id: str, timeout: float, url: str | None = None, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json", **self._headers}
        url = url or f"{self.url}/chat/completions"
        if body is not None and self.shape.id_field is not None and url.endswith("/chat/completions"):
            body = body | {self.shape.id_field: request_id}
        data = None if body is None else msgspec.json.encode(body)
        limits = self._timeout(timeout, silence)
        async with self._errors(), self._http.post(url, data=data, headers=headers, timeout=limits) as response:
            try:
                if response.status != 200:
                    raise await self._refusal(response)
                yield response
            except BaseException:
                # not back to the pool: a closed connection is how the engine learns that nobody waits
                response.close()
                raise

    def _timeout(self, total: float, silence: float | None = None) -> aiohttp.ClientTimeout:
        connect = self._settings.engine_connect_timeout
        return aiohttp.ClientTimeout(total=total, sock_connect=connect, sock_read=silence)

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Network errors as engine errors; the witness hears how it went."""
        witness = self._witness
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.forget()
            if witness is not None:
                witness.refused()
            raise EngineAway("the engine does not accept connections", retry_after=2.0, untouched=True) from error
        except TimeoutError as error:
            raise EngineTimeout("the engine did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self.forget()
            if witness is not None:
                witness.broke()
            raise EngineFailed("the connection to the engine broke") from error
        except ModelUnknown:
            self.forget()
            raise

    def _answered(self) -> None:
        # told of calls only: an engine that breaks every call may answer all else
        if self._witness is not None:
            self._witness.answered()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._settings.max_answer_bytes:
                raise EngineBroken(f"the engine's answer is over {self._settings.max_answer_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _refusal(self, response: aiohttp.ClientResponse) -> EngineError:
        text = await response.content.read(ERROR_BODY_BYTES)
        return refusal(response.status, text, response.headers)

    # what it is -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Ask it again what it is: it may be back with another model, log-probability mode or chat template."""
        self.engine = self._takes_late_system = None
        self._has_paused = True

    async def identity(self) -> Engine:
        """Model, build and log-probability mode.

        Raises:
            EngineUnfit: it fails its self-test.
            ModelUnknown: it does not serve the model.
            EngineError: the engine is away or refuses the questions.
        """
        if self.engine is not None:
            return self.engine
        if self._learning is None or self._learning.done():
            # one asks for all: a thousand calls must not wait one after the other for an engine that is away
            self._learning = asyncio.create_task(self._learn())
            self._learning.add_done_callback(_heard)
        return await asyncio.shield(self._learning)

    async def close(self) -> None:
        """End what is still asked."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)

    async def _learn(self) -> Engine:
        try:
            models = await self._get(f"{self.url}/models")
            told = models.get("data")
            served = [one for one in told if isinstance(one, dict) and "id" in one] if isinstance(told, list) else []
            found = next((one for one in served if self._model in (None, one["id"])), None)
            if found is None:
                names = ", ".join(str(one["id"]) for one in served) or "nothing"
                raise ModelUnknown(f"the engine does not serve {self._model or 'any model'}; it serves {names}")
            length = found.get("max_model_len")
            self.max_model_len = length if isinstance(length, int) else None
            self.shape = await self._shape(found)
            build = (await self._get(self.root + self.shape.build_path, optional=True)).get("version")
            mode = await self._tested(str(found["id"]))
            self._has_version = self._settings.weight_info == "auto"
            self._has_version = await self.weight_version() is not None
        except (EngineUnfit, ModelUnknown) as error:
            self.unfit = error
            raise
        self.unfit = None
        self.engine = Engine(
            model=str(found["id"]),
            endpoint=self.url,
            build=None if build is None else f"{self.shape.name} {build}",
            logprobs_mode=mode,
        )
        return self.engine

    async def _shape(self, served: Json) -> Shape:
        if self._kind in SHAPES:
            return SHAPES[self._kind]
        owner = served.get("owned_by")
        if owner in SHAPES:
            return SHAPES[owner]
        if await self._get(self.root + VLLM.build_path, optional=True):
            return VLLM
        return SGLANG if await self._get(self.root + SGLANG.version_path, optional=True) else VLLM

    async def _tested(self, model: str) -> LogprobsMode:
        """Ask for one token, and for its ids and log-probabilities; at two temperatures where the mode is not told.

        Raises:
            EngineUnfit: no record may be made of its answer.
        """
        told = self._settings.logprobs_mode
        tops: list[Sequence[tuple[str, float]]] = []
        for temperature in TEMPERATURES if told == "auto" else TEMPERATURES[:1]:
            answer = Answer(1, keep_entries=True)
            body = probe(model, temperature, self.shape.token_fields)
            timeout = self._settings.engine_probe_timeout
            try:
                await self.whole(body, answer, request_id=SELF_TEST, timeout=timeout)
                entries = answer.reply().choices[0].entries
            except (EngineBroken, EngineRefused) as error:
                raise EngineUnfit(
                    f"the engine failed its self-test, so nothing of it can be captured: {error.message}",
                    retry_after=UNFIT_RETRY_AFTER_S,
                ) from None
            tops.append([(one.token, one.logprob) for one in entries[0].top_logprobs or ()] if entries else [])
        return read_mode(*tops) if told == "auto" else LogprobsMode(told)

    async def weight_version(self) -> str | None:
        """The engine's word on its weights now; None where it has none."""
        if not self._has_version:
            return None
        told = await self._get(self.root + self.shape.version_path, optional=True)
        version = told.get("weight_version")
        if version is None:
            return None
        self.version = str(version)
        return self.version

    async def _get(self, url: str, *, optional: bool = False, timeout: float | None = None) -> Json:
        limits = self._timeout(timeout or self._settings.engine_probe_timeout)
        async with self._errors(), self._http.get(url, headers=self._headers, timeout=limits) as response:
            if response.status != 200:
                if optional:
                    return {}
                raise await self._refusal(response)
            data = await self._read(response)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            if optional:
                return {}
            raise EngineBroken(f"the engine's answer to GET {url.rpartition('/')[2]} is no JSON object") from None

    # how it is ------------------------------------------------------------------------------------------------------

    async def well(self) -> bool:
        """Whether it says that it is well.

        Raises:
            EngineError: it does not say anything.
        """
        limits = self._timeout(self._settings.engine_health_timeout)
        async with self._errors(), self._http.get(f"{self.root}/health", headers=self._headers, timeout=limits) as told:
            # an engine without this route is as well as one that answers can be
            return told.status < 500

    async def paused(self) -> bool:
        """Whether somebody has paused it; False where it cannot tell.

        Raises:
            EngineError: it does not answer.
        """
        path = self.shape.paused_path
        if path is None or not self._has_paused:
            return False
        told = await self._get(self.root + path, optional=True, timeout=self._settings.engine_health_timeout)
        self._has_paused = "is_paused" in told
        return bool(told.get("is_paused"))

    async def pause(self, mode: str) -> bool:
        """Pause it: `abort` ends its calls, `keep` freezes them. Whether it can.

        Raises:
            EngineError: it is away or fails.
        """
        return await self._lifecycle(*self.shape.pause_modes[mode])

    async def resume(self) -> bool:
        """Let it go on. Whether it can be asked to.

        Raises:
            EngineError: it is away or fails.
        """
        return await self._lifecycle(*self.shape.resume)

    async def _lifecycle(self, path: str, body: Json | None) -> bool:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", **self._headers}
        limits = self._timeout(self._settings.engine_probe_timeout)
        async with (
            self._errors(),
            self._http.post(self.root + path, data=data, headers=headers, timeout=limits) as told,
        ):
            if told.status in (404, 405):
                return False
            if told.status != 200:
                raise await self._refusal(told)
            return True


def _heard(task: asyncio.Task[Engine]) -> None:
    """Takes an error that nobody waits for any more: whoever needs the engine next asks again."""
    if not task.cancelled():
        task.exception()
