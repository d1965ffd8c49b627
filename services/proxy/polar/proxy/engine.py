"""The client of vLLM's OpenAI API.

Promises: a request leaves with explicit parameters and comes back as a checked `Answer` or as a typed error; cancelling
a call closes its connection at once, which ends the generation in the engine; an engine's error keeps its meaning and
loses what it may quote of a prompt only where it is logged. It knows neither sessions nor Kafka nor dialects.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from polar.schemas import Engine, LogprobsMode
from polar.service.clock import Clock

from .answer import Answer
from .calls import Call, Delta, Json
from .errors import (
    EngineAway,
    EngineBroken,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    PromptTooLong,
)
from .placing import LATE, PLAIN, tokenize_body
from .selftest import TEMPERATURES, probe, read_mode
from .settings import ProxySettings

DONE = b"[DONE]"
ERROR_BODY_BYTES = 64 * 1024
REFUSALS = (400, 413, 422)
BUSY = (408, 429, 503)


class Count(NamedTuple):
    """Tokens of a prompt, and the most that the model takes of prompt and reply together; None: it does not say."""

    tokens: int
    limit: int | None


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None = None


class Endpoint:
    """One engine. `identity` is learned at the first call and again after the engine was away."""

    def __init__(self, url: str, settings: ProxySettings, http: aiohttp.ClientSession, clock: Clock) -> None:
        self.url = url
        self.max_model_len: int | None = None
        """Tokens of prompt and reply together; None: not known yet."""
        self.away_since: float | None = None
        self._settings = settings
        self._http = http
        self._clock = clock
        self._engine: Engine | None = None
        self._has_weight_info = False
        self._takes_late_system: bool | None = None
        self._learning: asyncio.Task[Engine] | None = None

    # calls ----------------------------------------------------------------------------------------------------------

    async def whole(self, body: Json, answer: Answer, *, request_id: str, timeout: float) -> None:
        """Ask for a whole answer and feed it to `answer`."""
        async with self._post(body, request_id, timeout) as response:
            answer.feed(await self._read(response))

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
            async for data in response.content.iter_any():
                deltas: list[Delta] = []
                for event in events.feed(data):
                    # read on to the end after it, so that the connection can be used again
                    done = done or event == DONE
                    deltas += [] if done else answer.feed(event)
                if deltas:
                    yield deltas
        if not done:
            raise EngineFailed("the engine's stream ended before its reply did")

    async def count(self, call: Call) -> Count:
        """Count the prompt that the engine makes of `call`; images count as their placeholders in the text.

        Raises:
            EngineRefused: as the call itself would be.
            EngineFailed: the engine cannot count.
        """
        return await self._count(tokenize_body(call, (await self.identity()).model))

    async def _count(self, body: Json) -> Count:
        url = f"{self.url.removesuffix('/v1')}/tokenize"
        async with self._post(body, "polar-count", self._settings.engine_probe_timeout, url) as response:
            data = await self._read(response)
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
        self, body: Json, request_id: str, timeout: float, url: str | None = None, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        url = url or f"{self.url}/chat/completions"
        async with (
            self._errors(),
            self._http.post(
                url, data=msgspec.json.encode(body), headers=headers, timeout=self._timeout(timeout, silence)
            ) as response,
        ):
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
        """Network errors as engine errors; notes whether the engine is there."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._gone()
            raise EngineAway("the engine does not accept connections", retry_after=2.0) from error
        except TimeoutError as error:
            raise EngineTimeout("the engine did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self._gone()
            raise EngineFailed("the connection to the engine broke") from error
        else:
            self.away_since = None

    def _gone(self) -> None:
        # it may come back with another model or another log-probability mode
        self._engine = self._takes_late_system = None
        self.away_since = self._clock.monotonic()

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

    async def identity(self) -> Engine:
        """Model, build and log-probability mode.

        Raises:
            EngineError: the engine is away or refuses the questions.
        """
        if self._engine is not None:
            return self._engine
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
        settings = self._settings
        models = await self._get(f"{self.url}/models")
        served = [one for one in models.get("data", ()) if isinstance(one, dict)] if models else []
        found = next((one for one in served if settings.model in (None, one.get("id"))), None)
        if found is None:
            names = ", ".join(str(one.get("id")) for one in served) or "nothing"
            raise EngineFailed(f"the engine does not serve {settings.model or 'any model'}; it serves {names}")
        length = found.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        root = self.url.removesuffix("/v1")
        build = (await self._get(f"{root}/version", optional=True)).get("version")
        told = await self._get(f"{root}/weight_info", optional=True) if settings.weight_info == "auto" else {}
        self._has_weight_info = "weight_version" in told
        self._engine = Engine(
            model=str(found["id"]),
            endpoint=self.url,
            build=None if build is None else f"vllm {build}",
            logprobs_mode=await self._mode(str(found["id"])),
        )
        return self._engine

    async def _mode(self, model: str) -> LogprobsMode:
        if self._settings.logprobs_mode != "auto":
            return LogprobsMode(self._settings.logprobs_mode)
        tops: list[Sequence[tuple[str, float]]] = []
        for temperature in TEMPERATURES:
            answer = Answer(1, keep_entries=True)
            await self.whole(
                probe(model, temperature),
                answer,
                request_id="polar-self-test",
                timeout=self._settings.engine_probe_timeout,
            )
            entries = answer.reply().choices[0].entries
            tops.append([(one.token, one.logprob) for one in entries[0].top_logprobs or ()] if entries else [])
        return read_mode(*tops)

    async def weight_version(self) -> str | None:
        """The engine's word on its weights now; None where it has none."""
        if not self._has_weight_info:
            return None
        told = await self._get(f"{self.url.removesuffix('/v1')}/weight_info", optional=True)
        version = told.get("weight_version")
        return None if version is None else str(version)

    async def _get(self, url: str, *, optional: bool = False) -> Json:
        timeout = self._timeout(self._settings.engine_probe_timeout)
        async with self._errors(), self._http.get(url, timeout=timeout) as response:
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


class Engines:
    """All engines; a session stays with one, for the sake of its prefix cache, while that one answers."""

    def __init__(self, settings: ProxySettings, http: aiohttp.ClientSession, clock: Clock) -> None:
        self.all = [Endpoint(url, settings, http, clock) for url in settings.engine_urls]
        self._cooldown = settings.engine_cooldown
        self._clock = clock

    async def close(self) -> None:
        for endpoint in self.all:
            await endpoint.close()

    def of(self, session_id: str) -> Endpoint:
        """The session's engine: the highest of its hashes with each (rendezvous), those just away last."""
        now = self._clock.monotonic()

        def rank(endpoint: Endpoint) -> tuple[bool, bytes]:
            away = endpoint.away_since is not None and now - endpoint.away_since < self._cooldown
            return not away, hashlib.blake2b(f"{endpoint.url}\n{session_id}".encode(), digest_size=8).digest()

        return max(self.all, key=rank)


def request_body(call: Call, model: str, sampling: Json, *, cache_salt: str) -> Json:
    """What is posted, save the stream's fields."""
    body: Json = {
        **call.extras,
        **sampling,
        "model": model,
        "messages": call.messages,
        "return_token_ids": True,
        "return_weight_versions": True,
        "logprobs": True,
        "top_logprobs": call.top_logprobs,
        "cache_salt": cache_salt,
    }
    if call.tools is not None:
        body["tools"] = call.tools
    return body


def cache_salt(tenant: str, version: str | None) -> str:
    """Separates the prefix cache by tenant, and by weights: engines keep prefixes computed with older ones."""
    return hashlib.sha256(f"{tenant}\n{version or ''}".encode()).hexdigest()[:32]


def refusal(status: int, text: bytes, headers: Mapping[str, str]) -> EngineError:
    """An engine's error answer as an error of ours; its key and its model are the operator's, not the client's."""
    try:
        told = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    message, param = message if isinstance(message, str) else None, param if isinstance(param, str) else None
    if status in REFUSALS:
        if param == "input_tokens" or "maximum context length" in (message or ""):
            return PromptTooLong(message or "the prompt is longer than the model takes")
        return EngineRefused(message or "the engine refuses the request", status=status, param=param)
    if status in BUSY:
        return EngineAway("the engine takes no calls now", retry_after=_seconds(headers.get("Retry-After")) or 1.0)
    if status in (401, 403):
        return EngineFailed("the engine refuses the proxy's key; set POLAR_PROXY_ENGINE_API_KEY")
    if status == 404:
        return EngineFailed("the engine does not serve the model; see POLAR_PROXY_MODEL and POLAR_PROXY_ENGINE_URLS")
    return EngineFailed(f"the engine answered {status}")


def _heard(task: asyncio.Task[Engine]) -> None:
    """Takes an error that nobody waits for any more: whoever needs the engine next asks again."""
    if not task.cancelled():
        task.exception()


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None


class Events:
    """Cuts a stream of server-sent events into the data of each; lines may be as long as an answer may."""

    def __init__(self, limit: int) -> None:
        self._rest = b""
        self._left = limit
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the lines that `data` completes.

        Raises:
            EngineBroken: more than `limit` bytes have come.
        """
        self._left -= len(data)
        if self._left < 0:
            raise EngineBroken(f"the engine's answer is over {self._limit} bytes")
        *lines, self._rest = (self._rest + data).split(b"\n")
        # vLLM writes one data line per event; comments and other fields mean nothing here
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
