"""What a task may set in `builder.config`. Unknown names are refused, so that a misspelt one cannot vanish."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from polar.schemas import BuilderSpec, Label


class ConfigWrong(ValueError):
    """`builder.config` does not fit the strategy; says which field."""


TRAINED = frozenset({Label.MAIN, Label.SUBAGENT, Label.COMPACTION})


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What trains. Everything else is kept in its trace and masked."""

    label_by: Literal["structure", "marks"] = "structure"
    """How calls are told apart: by the harness's marks and, where it gives none, by structure; or by marks alone, where
    what has none is `main`."""
    train_labels: frozenset[Label] = TRAINED
    reward_labels: frozenset[Label] | None = None
    """Labels whose traces get the session's reward; unset: those that train."""
    train_greedy: bool = False
    """Temperature 0."""
    train_constrained: bool = False
    """Grammars, forced tools, bias, penalties, thinking budgets."""
    train_aborted: bool = False
    """Replies cut off by an abort or a lost connection (a length limit is no abort and trains)."""
    train_inexact_policy: bool = False
    """Tokens of a call in which the policy changed at an unknown place."""
    max_tokens_per_trace: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Longer traces keep their first so many ids; what follows is cut and said."""


class PerRequestConfig(TrainConfig, frozen=True, kw_only=True):
    """No more than what trains."""


class TreeConfig(TrainConfig, frozen=True, kw_only=True):
    """No more than what trains."""


class MergingConfig(TrainConfig, frozen=True, kw_only=True):
    on_drift: Literal["keep", "break", "mask"] = "keep"
    """Where the history renders a sampled turn as other ids of the same text: merge and say so; start a new trace; or
    merge and mask every turn after it."""
    siblings: Literal["trace", "set_aside"] = "trace"
    """Completions of the same prompt that the session did not go on from: traces of their own, or set aside."""
    tokenizer: str | None = None
    """SHA-256 of the model's `tokenizer.json`, one of those that POLAR_BUILDER_TOKENIZERS names: the text of a turn and
    of its rendering are then decoded and compared. Unset: judged by messages and ids alone (`polar.builder.rendering`).
    """


Config = TypeVar("Config", bound=TrainConfig)


def parse(spec: BuilderSpec, kind: type[Config]) -> Config:
    """`spec.config` as `kind`.

    Raises:
        ConfigWrong: names the field.
    """
    config: Any = spec.config
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigWrong(f"builder.config of {spec.strategy}: {error}") from None
