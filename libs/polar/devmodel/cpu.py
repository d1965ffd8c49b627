"""The embedded CPU model: SmolLM2-135M-Instruct behind vLLM's chat API, in plain NumPy.

For demos and tests on a laptop, where nothing but PyPI is at hand: real tokens with exact ids and log-probabilities,
real sampling, real batching. Never for production and never for speed: it is a small model at tens of tokens a second,
whose weights cannot be updated, without grammars and without a prefix cache. Use vLLM for everything else; the two
speak the same API, so changing is a change of address.

Promise: the same seed and request give the same ids and log-probabilities on one machine, whatever runs beside it.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from .batcher import Batcher, Job
from .chat import ChatTokenizer, bundled
from .checkpoint import find, read
from .choice import Burst
from .engine import Call
from .errors import ApiError
from .llama import Llama
from .request import CONSTRAINTS
from .sampler import Sampler
from .server import EngineServer

TEMPLATE = "chatml-tools.jinja"  # SmolLM2's own template drops tool calls from the history
MAX_MODEL_LEN = 8_192  # what the model was trained for; reading so much takes about half a minute
# 46 KB per position: 1.5 GB if it were ever full; memory is touched only as sequences grow.
KV_TOKENS = 32_768
UNSUPPORTED = ("prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "use_beam_search")


class CpuBackend:
    """Answers calls with the model's thread. `model_path` None takes the installed wheel's file."""

    def __init__(
        self,
        *,
        model_path: Path | None = None,
        template: str | None = None,
        model: str = "smollm2-135m",
        max_model_len: int = MAX_MODEL_LEN,
        kv_tokens: int = KV_TOKENS,
        max_rows: int = 32,
        max_waiting: int = 256,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.reasoning = False
        self._kv_tokens = kv_tokens
        self._path = model_path
        self._template = template
        self._entropy = entropy
        self._max_waiting = max_waiting
        self._batcher = Batcher(self._load, kv_tokens=kv_tokens, max_rows=max_rows)
        self.chat: ChatTokenizer

    def _load(self) -> Llama:
        return Llama(read(self._path or find()))

    async def start(self) -> None:
        """Load the model (seconds). Raises `ModelUnavailable`."""
        checkpoint = (await self._batcher.start()).checkpoint
        self.max_model_len = min(self.max_model_len, checkpoint.context, self._kv_tokens)
        template = await asyncio.to_thread(bundled, TEMPLATE) if self._template is None else self._template
        self.chat = ChatTokenizer(checkpoint.tokenizer, template, eos=checkpoint.eos)

    async def close(self) -> None:
        await self._batcher.close()

    async def prepare(self, call: Call) -> None:
        """Refuse what this model cannot do, rather than answer as if it had; 503 when too many calls wait already."""
        if self._batcher.waiting >= self._max_waiting:
            message = f"{self._max_waiting} calls are waiting already; try again later"
            raise ApiError(message, status=503, type="ServiceUnavailableError", headers={"Retry-After": "1"})
        if not call.prompt_ids:
            raise ApiError("The prompt must not be empty.", param="prompt")
        if any(not 0 <= token < self.chat.vocabulary for token in call.prompt_ids):
            raise ApiError(f"A token id is outside the vocabulary of {self.chat.vocabulary}.", param="token_ids")
        request = call.request
        if request is None:
            return
        for name in (*CONSTRAINTS, *UNSUPPORTED):
            asked = request.body.get(name)
            plain = name == "response_format" and isinstance(asked, dict) and asked.get("type") == "text"
            if asked and not plain:
                raise _unsupported(name)
        if request.tool_choice == "required" or isinstance(request.tool_choice, dict):
            raise _unsupported("tool_choice")

    async def generate(self, call: Call, index: int) -> AsyncGenerator[Burst, None]:
        sampling = call.for_choice(index)
        stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else {self.chat.eos_id})
        seed = self._entropy() if sampling.seed is None else sampling.seed
        job = Job(
            prompt_ids=call.prompt_ids,
            max_tokens=call.max_tokens,
            min_tokens=sampling.min_tokens,
            stops=stops,
            sampler=Sampler(sampling, call.prompt_ids, stops, seed),
        )
        self._batcher.submit(job)
        try:
            async with aclosing(job.tokens()) as tokens:
                async for token in tokens:
                    yield Burst((token,))
        finally:
            self._batcher.cancel(job)


def _unsupported(name: str) -> ApiError:
    return ApiError(
        f"{name} is not supported by the development model; use vLLM for it. (parameter={name})", param=name
    )


def cpu_server(
    backend: CpuBackend, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None
) -> EngineServer:
    """The model on a port; loading happens on entering."""
    return EngineServer(backend, host=host, port=port, api_key=api_key)
