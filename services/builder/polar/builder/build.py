"""`build`: a session's records in log order, and a builder's specification, to its trajectory.

Promises: a pure function, so that building again gives the same bytes; every call started up to the closing record is
in a trace or in `set_aside`; never raises for what a strategy or a session holds: a build that cannot be done is a
trajectory with an error and no traces. It must not know Kafka, a clock or settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

from polar.schemas import (
    BuilderSpec,
    BuildSummary,
    CompletionCaptured,
    Failure,
    FailureKind,
    Outcome,
    SessionOpened,
    SetAside,
    Status,
    Trajectory,
    canonical,
)
from polar.schemas.ids import trajectory_id

from .assembly import Chain, assemble, trained
from .config import ConfigWrong
from .registry import UnknownStrategy, load
from .samples import Material, Reader, read
from .session import Account, CallState, Entry, SessionState, Verdict
from .texts import Tokenizers

FORMAT: Final = "3"
"""Changes when the common part of all strategies would give other trajectories."""


class NotAccounted(RuntimeError):
    """A strategy lost a completion, used one twice, or joined samples that cannot be joined."""


def rebuild(
    records: Iterable[Entry],
    spec: BuilderSpec | None = None,
    *,
    allowed: Collection[str] = (),
    tokenizers: Tokenizers | None = None,
) -> Trajectory:
    """The trajectory of one session from its records in log order; later ones than the closing record are ignored.

    Args:
        records: from `SessionOpened` on.
        spec: the builder; None: the one the session was opened with.
        allowed: names of outside strategies that may be loaded.
        tokenizers: those that `spec` may name.

    Raises:
        ValueError: the records do not begin with `SessionOpened`, or hold no closing record.
    """
    state: SessionState | None = None
    reading: dict[int, _Reading] = {}
    for entry in records:
        if state is None:
            if not isinstance(entry.event, SessionOpened):
                raise ValueError(f"expected SessionOpened first, got {type(entry.event).__name__}")
            state = SessionState(entry.ref, entry.event)
            continue
        verdict = state.observe(entry)
        if verdict in (Verdict.KEPT, Verdict.BUILD) and isinstance(entry.event, CompletionCaptured):
            call = state.calls[entry.event.completion_id]
            if call.attempt not in reading:
                reading[call.attempt] = _Reading(tokenizers)
            if call.state is CallState.CAPTURED:
                reading[call.attempt].take(entry.event)
        if verdict is Verdict.BUILD:
            break
    if state is None:
        raise ValueError("no records")
    account = state.account()
    read_so_far = reading.get(account.attempt) or _Reading(tokenizers)
    return _built(account, read_so_far.material, spec, allowed)


def build(
    account: Account,
    bodies: Iterable[CompletionCaptured],
    spec: BuilderSpec | None = None,
    *,
    allowed: Collection[str] = (),
    tokenizers: Tokenizers | None = None,
) -> Trajectory:
    """The trajectory of a session at its closing record.

    Args:
        account: from `SessionState.account`.
        bodies: the session's captured completions in log order; those that do not count are left out here.
        spec: as in `rebuild`.
        allowed, tokenizers: as in `rebuild`.
    """

    def material() -> Material:
        wanted = account.captured
        return read((one for one in bodies if one.completion_id in wanted), tokenizers)

    return _built(account, material, spec, allowed)


class _Reading:
    """Completions of one attempt, taken as they come, so that none is kept whole until the session's end."""

    def __init__(self, tokenizers: Tokenizers | None) -> None:
        self._reader = Reader(tokenizers)
        self._error: Exception | None = None

    def take(self, completion: CompletionCaptured) -> None:
        if self._error is None:
            try:
                self._reader.take(completion)
            except Exception as error:  # noqa: BLE001 - told by `material`, where the build answers for it
                self._error = error

    def material(self) -> Material:
        if self._error is not None:
            raise self._error
        return self._reader.material


def _built(
    account: Account, read_material: Callable[[], Material], spec: BuilderSpec | None, allowed: Collection[str]
) -> Trajectory:
    spec = spec or account.opened.builder
    wanted = account.captured
    name = trajectory_id(account.opened.session_id, account.attempt, canonical(spec).decode())
    try:
        strategy = load(spec.strategy, allowed)(spec)
        material = read_material()
        missing = wanted.difference(material.completions)
        if missing:
            raise NotAccounted(f"{len(missing)} captured completions were not handed to the build")
        chains, left_out = strategy.chains(material)
        _check(material, chains, left_out)
        pool, traces, too_long = assemble(material, chains, strategy.config, name)
    except (ConfigWrong, UnknownStrategy) as error:
        return failed(account, spec, Failure(kind=FailureKind.TASK, message=str(error), stage="BUILT"))
    except Exception as error:  # noqa: BLE001 - the boundary to strategies, which may be anyone's
        message = f"builder {spec.strategy} failed: {type(error).__name__}: {error}"
        return failed(account, spec, Failure(kind=FailureKind.INFRA, message=message, stage="BUILT"))
    own = account.own()
    return Trajectory(
        trajectory_id=name,
        session_id=account.opened.session_id,
        attempt=account.attempt,
        task_id=account.opened.task_id,
        group_id=account.opened.group_id,
        sample=account.opened.sample,
        num_samples=account.opened.num_samples,
        status=account.outcome.status,
        outcome=account.outcome,
        pool=pool,
        traces=traces,
        set_aside=[*account.set_aside(), *material.set_aside, *left_out, *too_long],
        closing=account.closing,
        opening=account.opening,
        captured=len(wanted),
        failed=sum(call.failure is not None for call in own),
        builder=spec,
        builder_version=f"{FORMAT}.{strategy.version}",
        evaluator=account.opened.evaluator,
        harness=account.opened.harness,
        models=sorted({one.completion.engine.model for one in material.samples}),
        timing_ms=_timing(material),
        metadata=account.opened.metadata,
    )


def failed(account: Account, spec: BuilderSpec | None, failure: Failure) -> Trajectory:
    """The ending of a session that could not be built or published: an error and no traces."""
    spec = spec or account.opened.builder
    own = account.own()
    return Trajectory(
        trajectory_id=trajectory_id(account.opened.session_id, account.attempt, canonical(spec).decode()),
        session_id=account.opened.session_id,
        attempt=account.attempt,
        task_id=account.opened.task_id,
        group_id=account.opened.group_id,
        sample=account.opened.sample,
        num_samples=account.opened.num_samples,
        status=Status.ERROR,
        outcome=account.outcome,
        set_aside=[
            *account.set_aside(),
            *(
                SetAside(completion_id=call.completion_id, reason="not_built", attempt=call.attempt)
                for call in own
                if call.completion_id in account.captured
            ),
        ],
        closing=account.closing,
        opening=account.opening,
        captured=len(account.captured),
        failed=sum(call.failure is not None for call in own),
        builder=spec,
        builder_version=FORMAT,
        evaluator=account.opened.evaluator,
        harness=account.opened.harness,
        metadata=account.opened.metadata,
        error=failure,
    )


def summarize(trajectory: Trajectory, account: Account) -> BuildSummary:
    """What the scheduler and people need of a build."""
    reasons = Counter(one.reason for one in trajectory.set_aside)
    return BuildSummary(
        captured=trajectory.captured,
        failed=trajectory.failed,
        traces=len(trajectory.traces),
        trained_tokens=sum(trained(trace.turns) for trace in trajectory.traces if trace.trainable),
        prompt_tokens=sum(trace.prompt_length for trace in trajectory.traces),
        set_aside=dict(sorted(reasons.items())),
        statistics=trajectory.statistics(),
        failure=trajectory.error or _shown_by_calls(account),
    )


def _shown_by_calls(account: Account) -> Failure | None:
    """What the calls alone say went wrong."""
    own = account.own()
    provider = [call.failure for call in own if call.failure is not None and call.failure.kind is FailureKind.PROVIDER]
    captured = len(account.captured)
    last = own[-1].failure if own else None
    outcome: Outcome = account.outcome
    harness_failed = outcome.failure is not None and outcome.failure.kind is FailureKind.HARNESS
    if provider and (captured == 0 or (harness_failed and last is provider[-1])):
        return provider[-1]
    if captured == 0 and outcome.status in (Status.COMPLETED, Status.TIMEOUT):
        return Failure(
            kind=FailureKind.NO_COMPLETIONS,
            message="the harness ran and no model call was captured: point its model base URL at the proxy",
            stage="BUILT",
        )
    return None


def _check(material: Material, chains: list[Chain], left_out: list[SetAside]) -> None:
    """Every completion is somewhere and no sample twice, whatever a strategy does.

    Raises:
        NotAccounted: otherwise.
    """
    used: set[int] = set()
    for chain in chains:
        if not chain.links or chain.links[0].standing:
            raise NotAccounted("a chain begins with a sample whose prompt is whole")
        for link in chain.links:
            if link.sample.index in used:
                raise NotAccounted(f"completion {link.sample.completion.completion_id} is in two traces")
            if not 0 <= link.standing <= link.sample.prompt_length:
                raise NotAccounted("a link stands for more ids than its prompt has")
            used.add(link.sample.index)
    said = {material.samples[index].completion.completion_id for index in used}
    said.update(one.completion_id for one in [*material.set_aside, *left_out])
    lost = [one for one in material.completions if one not in said]
    if lost:
        raise NotAccounted(f"completions in no trace and not set aside: {', '.join(lost[:5])}")


def _timing(material: Material) -> dict[str, float]:
    """`model_ms`: time in the engine, summed over calls (they may overlap)."""
    calls = {one.completion.completion_id: one.completion for one in material.samples}
    if not calls:
        return {}
    return {"model_ms": float(sum(max(0, one.ended_ms - one.started_ms) for one in calls.values()))}
