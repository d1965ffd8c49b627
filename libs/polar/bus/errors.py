"""What can go wrong between a service and the log.

    BusError                 retryable as data
    ├── BrokerUnavailable    retryable: no broker answers, or not in time
    ├── Fenced               not retryable: another producer took this transactional id
    ├── RecordGone           not retryable: the log no longer has what was asked for
    │   └── CursorLost       and that is where a cursor stands (`cursors.py`)
    ├── Stuck                not retryable: no progress, whatever was tried; for the process's supervisor
    ├── RecordTooLarge       not retryable: over `max_record_bytes`; move parts of it into a claim
    ├── BlobWrong            not retryable: a claim's bytes are missing or are not what the claim says
    └── TopicsWrong          not retryable: topics are not as the topic table wants them

Knows nothing of the services; `translated` is the one place where aiokafka's errors become these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from aiokafka import errors as kafka

if TYPE_CHECKING:
    from .records import Out


class BusError(Exception):
    """The log could not do what was asked. `retryable`: doing it again, with new clients, can help."""

    retryable: bool = True

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


class BrokerUnavailable(BusError):
    """No broker answers, or not within the time limit. What was being sent may or may not be in the log."""


class Fenced(BusError):
    """Another producer with this transactional id has started, or this one's transaction ran into its time-out.

    Whoever gets this no longer owns what the id stands for: close, forget, and own it anew only if still asked to.
    """

    retryable = False


class RecordGone(BusError):
    """Records that were asked for are not in the log (any more)."""

    retryable = False

    def __init__(self, message: str, *, topic: str, partition: int, offset: int, log_start: int | None = None) -> None:
        super().__init__(message)
        self.topic = topic
        """Without the prefix."""
        self.partition = partition
        self.offset = offset
        """The first one asked for."""
        self.log_start = log_start
        """The first offset that the log still has, where known."""


class Stuck(BusError):
    """Records wait, and starting their processing anew has not helped: a new process may do better."""

    retryable = False


class RecordTooLarge(BusError):
    """A record is over `max_record_bytes`."""

    retryable = False

    def __init__(self, message: str, *, topic: str, size: int, limit: int, out: Out | None = None) -> None:
        super().__init__(message)
        self.out = out
        """The record, where it is known which."""
        self.topic = topic
        self.size = size
        """Bytes of key, value and headers with their framing."""
        self.limit = limit


class BlobWrong(BusError):
    """The bytes of a claim are missing from the blob store, or are not those it names."""

    retryable = False


class TopicProblem(NamedTuple):
    """One setting of one topic that is not as the topic table wants it."""

    topic: str
    """As the broker knows it, with prefix."""
    setting: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} is {self.found}, wanted {self.wanted}"


class TopicsWrong(BusError):
    """Topics are missing or set otherwise than the topic table wants them."""

    retryable = False

    def __init__(self, problems: list[TopicProblem]) -> None:
        lines = "; ".join(str(one) for one in problems)
        super().__init__(
            f"topics are not as this version needs them: {lines}. "
            "Change the topics or POLAR_KAFKA_ settings so that they agree; partition counts cannot be lowered."
        )
        self.problems = problems


_FENCED = (kafka.ProducerFenced, kafka.InvalidProducerEpoch)
_AWAY = (
    kafka.KafkaConnectionError,
    kafka.KafkaTimeoutError,
    kafka.NodeNotReadyError,
    kafka.RequestTimedOutError,
    kafka.NoBrokersAvailable,
    kafka.KafkaUnavailableError,
    kafka.BrokerNotAvailableError,
    kafka.LeaderNotAvailableError,
)
_FINAL = (
    kafka.AuthenticationFailedError,
    kafka.AuthenticationMethodNotSupported,
    kafka.SaslAuthenticationFailed,
    kafka.UnsupportedSaslMechanismError,
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.TransactionalIdAuthorizationFailed,
    kafka.IncompatibleBrokerVersion,
    kafka.UnrecognizedBrokerVersion,
    kafka.UnsupportedVersionError,
    kafka.InvalidTransactionTimeout,
)


def translate(error: BaseException, doing: str) -> BusError:
    """The `BusError` that an error of aiokafka amounts to. `doing`: what was being done, for the message."""
    if isinstance(error, BusError):
        return error
    text = f"{doing}: {type(error).__name__}: {error}" if str(error) else f"{doing}: {type(error).__name__}"
    if isinstance(error, _FENCED):
        return Fenced(f"{doing}: fenced by another producer of this transactional id, or by its time-out")
    if isinstance(error, TimeoutError):
        return BrokerUnavailable(f"{doing}: the broker did not answer in time")
    if isinstance(error, _AWAY):
        return BrokerUnavailable(text)
    if isinstance(error, _FINAL):
        return BusError(text, retryable=False)
    return BusError(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises what aiokafka raises as a `BusError`.

    AssertionError and the like are in the list because aiokafka checks its transaction states with `assert`, and its
    clients fail so when they are used after a fatal error or while they stop.
    """
    try:
        yield
    except BusError:
        raise
    except (kafka.KafkaError, kafka.IllegalOperation, kafka.ConsumerStoppedError, TimeoutError, OSError) as error:
        raise translate(error, doing) from error
    except (AssertionError, AttributeError) as error:
        raise BusError(f"{doing}: the client is no longer usable ({type(error).__name__}: {error})") from error
