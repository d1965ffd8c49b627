"""The raw data set: the values of `polar.completions`, keyed by session id, so ordered per session.

The scheduler's records frame a session (`SessionOpened` … `SessionClosed`, `SessionFinal`); the proxy's records bracket
each call: `CallStarted`, acknowledged before the engine is asked, then at most one `CompletionCaptured` or
`CompletionFailed`. Everything a builder or a replay needs is here, though `polar.tasks` be gone. Times are milliseconds
since the epoch; a field without a value is null.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .arrays import Logprobs, TokenIds
from .base import Claim, Event, Part, RecordRef
from .failures import Failure
from .stages import Outcome
from .tasks import BuilderSpec, EvaluatorSpec


class Budgets(Part, frozen=True, kw_only=True):
    """Seconds."""

    queue_ttl: float
    init_timeout: float
    timeout_seconds: float
    evaluation_timeout: float


class SessionOpened(Event, frozen=True, kw_only=True):
    session_id: str
    task_id: str
    group_id: str
    sample: int
    num_samples: int
    source: RecordRef
    """The task's record."""
    harness: str
    builder: BuilderSpec
    evaluator: EvaluatorSpec
    model_name: str | None = None
    tenant: str = "default"
    metadata: dict[str, Any] = {}
    budgets: Budgets
    at_ms: int


class AttemptFenced(Event, frozen=True, kw_only=True):
    """This attempt is over and its records are set aside; another follows."""

    session_id: str
    attempt: int
    failure: Failure
    at_ms: int


class SessionClosed(Event, frozen=True, kw_only=True):
    """Exactly one per accepted session. Its attempt is the one that counts."""

    session_id: str
    attempt: int
    outcome: Outcome
    at_ms: int


class SessionFinal(Event, frozen=True, kw_only=True):
    """Nothing of this session is waited for any more."""

    session_id: str
    attempt: int
    at_ms: int


class Sampling(Part, frozen=True, kw_only=True):
    """Sampling parameters; None: not given (asked) or not known (effective)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []
    n: int | None = None


class PolicySpan(Part, frozen=True, kw_only=True):
    """Which policy version sampled the tokens from `start` to `end` (exclusive) of a choice."""

    start: int
    end: int
    version: str
    exact: bool
    """False: the version changed somewhere in the call, and `version` is the later one."""


class MediaPart(Part, frozen=True, kw_only=True):
    """An image or the like inside a prompt."""

    kind: str
    sha256: str
    offset: int
    """Of its first placeholder id in the prompt; -1: not known (the proxy's `image_token_id` is not set)."""
    length: int
    """Placeholder ids; 0: not known."""


class PromptBase(Part, frozen=True, kw_only=True):
    """The first `ids` ids and `messages` messages of an earlier, acknowledged completion of the same attempt.

    A completion's ids are those of its whole prompt and of its first choice, one after the other; so its messages.
    """

    completion_id: str
    offset: int
    """Of that completion's record, in the same partition."""
    ids: int
    messages: int


class Prompt(Part, frozen=True, kw_only=True):
    """What the engine was given: `base`'s share first, then these."""

    ids: TokenIds
    messages: list[dict[str, Any]] = []
    """Normalized, OpenAI Chat form."""
    base: PromptBase | None = None
    """None: the prompt is whole. `polar.schemas.prompts` makes it so."""
    more: list[PromptBase] = []
    """After the base's share, in order: what these completions have from there up to as many ids and messages. Used
    where one reference alone would make the chain of references too long."""
    tools: list[dict[str, Any]] | None = None
    tools_sha256: str | None = None
    """With a base and without `tools`: they are those of the last completion referred to."""
    media: list[MediaPart] = []


class Choice(Part, frozen=True, kw_only=True):
    """One sampled reply. `ids` and `logprobs` have the same length."""

    index: int = 0
    ids: TokenIds
    logprobs: Logprobs
    message: dict[str, Any]
    """The reply as the engine parsed it, OpenAI Chat form."""
    finish: str | None
    """The engine's finish reason: `stop`, `length`, `tool_calls`, `abort`, …; None: cut off."""
    stop: int | str | None = None
    """The stop token or stop string that ended it; None: end of sequence."""
    spans: list[PolicySpan] = []
    """Empty: the engine did not tell its version."""
    routed_experts: Claim | None = None


class LogprobsMode(StrEnum):
    RAW = "raw_logprobs"
    """Before temperature."""
    PROCESSED = "processed_logprobs"
    """Of the distribution that was sampled from."""
    UNKNOWN = "unknown"


class Engine(Part, frozen=True, kw_only=True):
    model: str
    endpoint: str
    build: str | None = None
    tokenizer_sha256: str | None = None
    template_sha256: str | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.UNKNOWN


class ClientHints(Part, frozen=True, kw_only=True):
    """What the harness says of a call, as data."""

    user_agent: str | None = None
    subagent: str | None = None
    parent: str | None = None
    request_kind: str | None = None
    """The harness's own word for it: a title, a compaction, a probe."""
    session: str | None = None
    """The harness's own name for its session."""
    thread: str | None = None
    """Which of a session's conversations this is, where the harness names them: a sub-agent has one of its own."""


class CallStarted(Event, frozen=True, kw_only=True):
    completion_id: str
    session_id: str
    attempt: int
    call: int
    """Counts the attempt's calls from 0, as this replica of the proxy saw them, and at least as many as its request's
    history holds replies; log order decides, not this."""
    dialect: str
    at_ms: int


class CompletionCaptured(Event, frozen=True, kw_only=True):
    completion_id: str
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    call: int
    started_ms: int
    first_token_ms: int | None = None
    ended_ms: int
    dialect: str
    """`openai.chat`, `openai.responses`, `anthropic.messages`, `google.generate`, `engine.tokens`."""
    streamed: bool = False
    harness: str | None = None
    hints: ClientHints = ClientHints()
    request_sha256: str
    """Of the raw request body."""
    prompt: Prompt
    choices: list[Choice]
    sampling_asked: Sampling
    sampling: Sampling
    """In effect, as sent to the engine."""
    constraints: list[str] = []
    """What forced or masked tokens: `grammar`, `forced_tool`, `logit_bias`, `penalties`, `thinking_budget`, …."""
    engine: Engine
    usage: dict[str, int] = {}
    retry_of: str | None = None
    context_kind: str | None = None
    """How its messages stand to the attempt's earlier calls: `append` goes on from one, whose messages and reply (its
    thinking too) they begin with, and adds no reply of its own; `rewrite` comes after one whose history it changed (a
    reply or some thinking that was sampled is not there, or one is that was not); `fresh` has no part of one, or asks
    the same again. Call ids, spacing and empty fields make no difference. Null: not known, because the proxy has
    forgotten the calls before it or another replica answered them, or its history holds replies of no call."""
    drift: int | None = None
    """Ids by which this prompt differs from what was sampled, counted against the earlier call that it goes on from
    (the longest whose messages and reply it begins with, thinking aside): 0 exactly where the prompt's ids begin with
    that call's prompt ids and sampled ids. Else both are aligned, and each stretch that differs counts as many ids as
    its longer side has; where no alignment is found within 4,096 ids, all the rest of the earlier ids counts. Null:
    there is no such call, or the proxy does not know it."""
    capture: str = "rendered"
    """Where the prompt's ids come from: `rendered` from its messages by the engine, or `token_in`: the exact ids of an
    earlier prompt and reply, and after them only what is new."""
    fallback: str | None = None
    """In a token-in session, why a call with a history was rendered all the same: `history_changed`, `not_remembered`,
    `reasoning_dropped`, `tools_changed`, `template_changed`, `template_rewrote`, `no_end_of_turn`, `media`,
    `constraint`, `prefill`, `engine`."""
    complete: bool = True
    """False: the client went away or the engine was cut off; `choices` hold what was generated until then."""


class CompletionFailed(Event, frozen=True, kw_only=True):
    completion_id: str
    session_id: str
    attempt: int
    call: int
    failure: Failure
    http_status: int | None = None
    """What the harness was answered; None: it was gone."""
    at_ms: int


Bracket = CallStarted | CompletionCaptured | CompletionFailed
"""The proxy's records."""
