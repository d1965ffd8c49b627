"""The engine's own tokenizer, over HTTP: `/tokenize` and `/detokenize`, as vLLM and the embedded model have them.

So the ids of whatever model Polar is pointed at have names, with no tokenizer file. Blocks: call it in a thread.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from polar.service.settings import CONFIG_VARIABLE, read_config

TIMEOUT_S = 30.0
ENGINES_VARIABLE = "POLAR_PROXY_ENGINE_URLS"
POOLS_VARIABLE = "POLAR_PROXY_ENGINES"


class NoWords(Exception):
    """The engine does not tell; the message says why."""


class Encoded(NamedTuple):
    ids: list[int]


def engine_named(environ: Mapping[str, str], models: Sequence[str] = ()) -> str | None:
    """Base URL of an engine that the settings name, in the environment or in the file of POLAR_CONFIG.

    `models`: what engines call the models that are wanted; the first that serves one of them, else the first of all.
    """
    path = environ.get(CONFIG_VARIABLE)
    proxy: Mapping[str, Any] = (read_config(Path(path)).get("proxy") or {}) if path else {}
    pools = environ.get(POOLS_VARIABLE) or proxy.get("engines") or []
    if isinstance(pools, str):
        pools = json.loads(pools)
    serving = [one for one in pools if one.get("served", one.get("model")) in models]
    for one in (serving or pools)[:1]:
        return _first(one.get("urls"))
    return _first(environ.get(ENGINES_VARIABLE) or proxy.get("engine_urls"))


def _first(said: Any) -> str | None:
    urls = said.split(",") if isinstance(said, str) else list(said or [])
    return str(urls[0]).strip().rstrip("/") if urls else None


class EngineTokenizer:
    """What `polar.cli.tokens` needs of a `tokenizers.Tokenizer`, asked of an engine; answers are kept.

    `base_url` ends in /v1; `model`: the first that the engine serves, by default. Every method raises NoWords where the
    engine does not answer as expected.
    """

    def __init__(self, base_url: str, model: str | None = None) -> None:
        url = urlsplit(base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.netloc, timeout=TIMEOUT_S)
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._decoded: dict[tuple[int, ...], str] = {}
        self._encoded: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def model(self) -> str:
        """The model whose tokenizer it is."""
        if self._model is None:
            served = self.served()
            if not served:
                raise NoWords("the engine serves no model")
            self._model = served[0]
        return self._model

    def served(self) -> list[str]:
        """The names of the models that the engine serves."""
        try:
            return [str(one["id"]) for one in self._ask("GET", "/v1/models")["data"]]
        except (LookupError, TypeError) as error:
            raise NoWords(f"the engine does not name its models: {error!r}") from error

    def speak(self, models: Collection[str]) -> None:
        """Be the tokenizer of one of `models`, or of the first served where none is named. Raises NoWords: no such."""
        served = self.served()
        self._model = next((one for one in served if not models or one in models), None)
        if self._model is None:
            raise NoWords(f"the engine serves {', '.join(served) or 'nothing'} now, not {', '.join(sorted(models))}")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens included."""
        key = tuple(ids)
        if key not in self._decoded:
            body = {"model": self.model, "tokens": list(ids)}
            self._decoded[key] = str(self._ask("POST", "/detokenize", body).get("prompt", "")) if ids else ""
        return self._decoded[key]

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoded:
        if text not in self._encoded:
            body = {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens}
            self._encoded[text] = [int(one) for one in self._ask("POST", "/tokenize", body).get("tokens", [])]
        return Encoded(self._encoded[text])

    def id_to_token(self, one: int) -> str | None:
        """Every sampled id is in its engine's vocabulary; its text is as good a name as any."""
        return self.decode([one])

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Engines do not list them; what they do to text shows in `decode`."""
        return {}

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, self._root + path, data, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            text = answer.read()
            found = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise NoWords(f"{path} of the engine failed: {error!r}") from error
        if answer.status != 200 or not isinstance(found, dict):
            raise NoWords(f"{path} of the engine answered {answer.status}: {text[:200]!r}")
        return found
