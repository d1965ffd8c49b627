"""The proxy's metrics, each with its reason; never a label whose values a client chooses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One set per proxy, in the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "polar_proxy_calls", "Calls by dialect and how they ended.", ["dialect", "outcome"], registry=registry
        )
        self.refused = Counter(
            "polar_proxy_refused", "Requests refused before their call began.", ["reason"], registry=registry
        )
        self.running = Gauge("polar_proxy_running", "Calls that hold a slot.", registry=registry)
        self.tokens = Counter("polar_proxy_sampled_tokens", "Tokens captured.", registry=registry)
        self.prompts = Counter(
            "polar_proxy_prompts", "Prompts captured, whole or against an earlier call.", ["form"], registry=registry
        )
        self.prompt_bytes_saved = Counter(
            "polar_proxy_prompt_bytes_saved",
            "Bytes of ids, messages and tools that references stood for.",
            registry=registry,
        )
        self.history_bytes = Gauge(
            "polar_proxy_history_bytes", "Held of earlier calls, for prompts to refer to.", registry=registry
        )
        self.contexts = Counter(
            "polar_proxy_contexts",
            "Calls by how their prompts stand to earlier calls, and whether their ids begin with what was sampled.",
            ["kind", "ids"],
            registry=registry,
        )
        self.drifted_ids = Counter(
            "polar_proxy_drifted_ids", "Ids by which prompts differed from what was sampled.", registry=registry
        )
        self.fallbacks = Counter(
            "polar_proxy_token_in_fallbacks",
            "Calls of token-in sessions whose prompt was rendered from messages all the same, by reason.",
            ["reason"],
            registry=registry,
        )
        self.unknown_fields = Counter(
            "polar_proxy_unknown_fields", "Request fields that were passed over.", ["dialect"], registry=registry
        )
        self.dropped = Counter(
            "polar_proxy_dropped",
            "Tools, traces of tools and thinking that only a provider could make use of, and that were left out.",
            ["dialect"],
            registry=registry,
        )
        self.joins = Counter(
            "polar_proxy_joins",
            "Requests that joined an earlier call whose client had gone, by how far that call was.",
            ["call"],
            registry=registry,
        )
        self.orphans = Counter(
            "polar_proxy_orphans", "Calls that ended with no client, by how.", ["outcome"], registry=registry
        )
        self.retries = Counter(
            "polar_proxy_retries",
            "Calls with the body of an earlier one whose client did not get all of its reply.",
            registry=registry,
        )
        self.resend_bytes = Gauge(
            "polar_proxy_resend_bytes", "Held of replies whose clients may come back for them.", registry=registry
        )
        self.ack = Histogram(
            "polar_proxy_ack_seconds",
            "From the end of a generation to the broker's acknowledgement of its capture.",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60),
            registry=registry,
        )
