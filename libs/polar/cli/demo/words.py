"""The engine's own tokenizer, over HTTP: `/tokenize` and `/detokenize`, as vLLM and the embedded model have them.

So the demo names the ids of whatever model it is pointed at, with no tokenizer file. Blocks: call it in a thread.
"""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


class NoWords(Exception):
    """The engine does not tell; the message says why."""


class Encoded(NamedTuple):
    ids: list[int]


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
            try:
                self._model = str(self._ask("GET", "/v1/models")["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise NoWords(f"the engine serves no model: {error!r}") from error
        return self._model

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
