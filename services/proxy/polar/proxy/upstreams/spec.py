"""Which engines serve which model: what an operator writes down."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

ANY_MODEL = "*"
Kind = Literal["vllm", "sglang"]


def base_url(url: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ValueError: it is no base URL of an engine.
    """
    found = url.strip().rstrip("/")
    if not found.startswith(("http://", "https://")) or not found.endswith("/v1"):
        raise ValueError(f"{url!r} is no base URL of an engine: it starts with http:// or https://, ends with /v1")
    return found


class EngineSpec(BaseModel):
    """Engines that are alike: one model, one kind, one key. Several entries of one model are one pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(ANY_MODEL, min_length=1, description="A session's model; `*`: any that no other entry names.")
    urls: tuple[str, ...] = Field(min_length=1, description="Base URLs, each ending in /v1.")
    served: str | None = Field(
        None, description="What the engines call the model. Default: `model`; for `*` the first that they serve."
    )
    kind: Literal["auto", "vllm", "sglang"] = Field("auto", description="auto: by what the engine says of itself.")
    api_key: SecretStr | None = Field(None, description="Key sent to these engines, in place of engine_api_key.")
    max_calls: int | None = Field(None, gt=0, description="In place of max_calls_per_endpoint.")
    max_waiting: int | None = Field(None, ge=0, description="In place of max_waiting_per_endpoint.")

    @field_validator("urls")
    @classmethod
    def _base_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(base_url(url) for url in value)
        if len(set(found)) < len(found):
            raise ValueError("an engine is named twice")
        return found

    @property
    def asked(self) -> str | None:
        """The model asked of the engines; None: their first."""
        return self.served or (None if self.model == ANY_MODEL else self.model)
