"""The proxy's settings: `POLAR_PROXY_…`, or the section `proxy` of the configuration file."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from polar.service.settings import PolarSettings, section_config

from .upstreams.spec import EngineSpec, base_url


class ProxySettings(PolarSettings):
    """Where the proxy listens, which engines it asks, and its limits. Times are seconds, sizes are bytes."""

    section: ClassVar[str] = "proxy"
    model_config = section_config("proxy")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8100, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")

    engine_urls: Annotated[list[str], NoDecode] = Field(
        ["http://127.0.0.1:8000/v1"],
        min_length=1,
        description="Base URLs of the engines, each ending in /v1, separated by commas, where one model is served; a "
        "session stays with one while it answers.",
    )
    engines: list[EngineSpec] = Field(
        [],
        description="Several models, or engines that differ: entries of model, urls, served, kind, api_key, max_calls, "
        "max_waiting (JSON in the environment). A session's model chooses; engine_urls is then not used.",
    )
    engine_kind: Literal["auto", "vllm", "sglang"] = Field(
        "auto", description="What the engines of engine_urls are; auto: by what they say of themselves."
    )
    engine_api_key: SecretStr | None = Field(None, description="Key sent to the engines.")
    model: str | None = Field(None, description="The model asked of the engines; default: the first one they serve.")
    logprobs_mode: Literal["auto", "raw_logprobs", "processed_logprobs"] = Field(
        "auto", description="What the engines' log-probabilities are; auto: find out with two calls of one token each."
    )
    weight_info: Literal["auto", "off"] = Field(
        "auto",
        description="Ask GET /weight_info around each call, where the engine has it and its answers do not tell.",
    )
    engine_connect_timeout: float = Field(5.0, gt=0, description="Until an engine accepts a connection.")
    engine_probe_timeout: float = Field(60.0, gt=0, description="Until an engine answers the self-test.")
    engine_probe_every: float = Field(5.0, gt=0, description="Between looks at an engine's health.")
    engine_health_timeout: float = Field(5.0, gt=0, description="Until an engine says how it is.")
    engine_failures: int = Field(
        3, ge=1, description="Failed looks, or broken connections, in a row after which an engine gets no calls."
    )
    engine_cooldown: float = Field(
        1.0, gt=0, description="Between looks at an engine that gets no calls; it gets them again when it is back."
    )
    max_calls_per_endpoint: int = Field(
        512, gt=0, description="Calls at a time to one engine, of this replica; more wait."
    )
    max_waiting_per_endpoint: int = Field(
        512, ge=0, description="Calls that may wait for one engine; more are answered 503 with Retry-After."
    )
    engine_wait: float = Field(
        120.0,
        gt=0,
        description="Longest wait for an engine that is full or paused; then 503 with Retry-After. Streaming clients "
        "are kept alive meanwhile.",
    )
    operator_key: SecretStr | None = Field(
        None,
        description="Key of /polar/v1/engines, where trainers pause and resume engines; unset: made of "
        "POLAR_TOKEN_SECRET (HMAC-SHA256 of `polar.operator`, as hex).",
    )
    call_timeout: float = Field(3_600.0, gt=0, description="Longest generation; a session's own end comes first.")
    engine_silence: float = Field(
        900.0,
        gt=0,
        description="Longest silence of an engine that streams, before its first token too; then the call is an error.",
    )
    max_answer_bytes: int = Field(128 * 1024 * 1024, gt=0, description="Largest answer read from an engine.")

    stream_mode: Literal["live", "synthetic"] = Field(
        "live",
        description="For streaming clients: forward deltas as they come, or wait for the whole reply and then tell it.",
    )
    stream_step: float = Field(
        0.04,
        ge=0,
        le=1,
        description="Least time between two pieces of a streamed reply, the first and the end apart: tokens that come "
        "meanwhile are told together, which costs less CPU. 0: each as it comes.",
    )
    early_headers_after: float = Field(
        10.0,
        gt=0,
        description="A streaming client gets its headers after so long at the latest; before, errors "
        "keep their status.",
    )
    keepalive_every: float = Field(10.0, gt=0, description="Between keep-alives while nothing else is said.")

    on_disconnect: Literal["abort", "finish"] = Field(
        "abort",
        description="When a client's connection closes before its reply is complete: abort the generation, or let it "
        "finish, so that the client finds it when it asks the same again within `resend_window`.",
    )
    resend_window: float = Field(
        120.0,
        ge=0,
        description="How long after its connection closed a client may come back with the same request, to join the "
        "call that it left (with `on_disconnect: finish`) or to have the new one marked as its retry. Clients were "
        "seen to wait up to 60 s.",
    )
    resend_bytes: int = Field(
        64 * 1024 * 1024,
        ge=0,
        description="Finished replies that are kept for that, of all sessions; the one left longest ago goes first.",
    )
    resend_session_bytes: int = Field(8 * 1024 * 1024, ge=0, description="Of one session's attempt.")
    resend_calls: int = Field(10_000, ge=1, description="Calls whose clients left that are remembered for that.")

    provider_tools: Literal["drop", "refuse"] = Field(
        "drop",
        description="Tools that a provider runs itself (web search, code execution), and their traces in a history: "
        "leave them out and count them, or answer 400. A request with no other tools is refused either way.",
    )
    foreign_thinking: Literal["drop", "refuse"] = Field(
        "drop", description="Thinking in a history that only the provider which made it can read."
    )
    image_urls: Literal["refuse", "allow"] = Field(
        "refuse", description="Images by URL: the engine fetches them itself, and what it saw is not recorded."
    )
    image_token_id: int | None = Field(
        None,
        ge=0,
        description="The id that stands for a piece of an image in a prompt, so that records say where images stand.",
    )
    thinking_switch: Literal["client", "template"] = Field(
        "client", description="Who says whether the model thinks: the request, or the chat template's own default."
    )
    late_system: Literal["auto", "keep", "fold"] = Field(
        "auto",
        description="System messages inside a conversation: left there, or told in the user message before them; auto: "
        "as the engine's chat template takes them.",
    )

    max_body_bytes: int = Field(16 * 1024 * 1024, gt=0, description="Largest request body.")
    body_timeout: float = Field(60.0, gt=0, description="Until a request's body has come; then 408.")
    max_concurrent: int = Field(1_024, gt=0, description="Calls at a time; more are answered 503 with Retry-After.")
    max_choices: int = Field(16, gt=0, description="Largest `n`.")
    max_sessions: int = Field(200_000, gt=0, description="Sessions that are remembered at a time.")
    control_memory: float = Field(
        691_200.0, gt=0, description="How far polar.control is read back at the start: the longest life of a token."
    )
    capture_mode: Literal["rendered", "token_in"] = Field(
        "rendered",
        description="For sessions that do not say: render each prompt from its messages, or keep the exact tokens of "
        "the prompt and reply before it and render what is new (needs engines with --enable-scale-out).",
    )
    keep_reasoning: Literal["as_template", "always"] = Field(
        "as_template",
        description="With token_in, for sessions that do not say: follow a chat template that strips earlier thinking, "
        "or keep the thinking as sampled.",
    )
    delta_prompts: bool = Field(
        True,
        description="Write a prompt as a reference to an earlier call of its session and what is new; off: whole.",
    )
    history_bytes: int = Field(
        256 * 1024 * 1024,
        ge=0,
        description="Earlier calls that are kept for that, and for what goes on from them (drift, token_in), of all "
        "sessions; the session that was quiet longest is forgotten first, and its next prompt is written whole. A "
        "session of 32,000 tokens takes about 0.2 MB.",
    )
    history_session_bytes: int = Field(
        4 * 1024 * 1024, ge=0, description="Of one session's attempt; beyond, it begins anew with a whole prompt."
    )
    history_sessions: int = Field(10_000, ge=1, description="Sessions of which earlier calls are kept.")
    response_bytes: int = Field(
        64 * 1024 * 1024,
        ge=0,
        description="Responses (OpenAI's API, unless `store` is false) that are kept for `previous_response_id`, item "
        "references and retrieval, of all sessions; the session that was quiet longest is forgotten first.",
    )
    response_session_bytes: int = Field(
        8 * 1024 * 1024, ge=0, description="Of one session's attempt; beyond, its oldest are forgotten."
    )
    retry_after: float = Field(1.0, gt=0, description="What Retry-After says where nothing better is known.")

    start_timeout: float = Field(10.0, gt=0, description="Until CallStarted is acknowledged; then 503.")
    capture_timeout: float = Field(
        60.0,
        gt=0,
        description="Until the capture is acknowledged; then the client is answered 503 while the proxy "
        "goes on trying.",
    )
    capture_retry_for: float = Field(900.0, gt=0, description="How long the end of a call is tried to be written.")
    drain_timeout: float = Field(30.0, ge=0, description="What calls get to end in when the proxy is asked to stop.")

    @field_validator("engine_urls", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("engine_urls")
    @classmethod
    def _base_urls(cls, value: list[str]) -> list[str]:
        return [base_url(url) for url in value]

    @property
    def specs(self) -> list[EngineSpec]:
        """All engines, whichever way they are told."""
        if self.engines:
            return list(self.engines)
        return [EngineSpec(urls=tuple(dict.fromkeys(self.engine_urls)), served=self.model, kind=self.engine_kind)]
