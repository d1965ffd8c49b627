"""Topic configs: the names Apache Kafka 4 knows, their types, defaults and checks.

Promises: a name or value that Apache Kafka refuses is refused here with INVALID_CONFIG; `TopicConfig` holds the
values the broker acts on. Configs that only matter to a cluster, to tiered storage or to flushing are accepted,
described and without effect. Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.settings import BrokerSettings

__all__ = ["ConfigSpec", "TopicConfig", "config_specs", "validated"]

MAX_LONG = (1 << 63) - 1
MAX_INT = (1 << 31) - 1
WEEK_MS = 7 * 24 * 3600 * 1000


class ConfigType(IntEnum):
    """Numbers of the DescribeConfigs response."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


@dataclass(frozen=True, slots=True)
class ConfigSpec:
    type: ConfigType
    default: str
    check: Callable[[str], bool]


def _integer(low: int, high: int) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        return low <= int(value) <= high

    return check


def _number(low: float, high: float) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        return low <= float(value) <= high

    return check


def _one_of(*choices: str) -> Callable[[str], bool]:
    return lambda value: value in choices


def _policies(value: str) -> bool:
    return all(part.strip() in ("compact", "delete") for part in value.split(",") if part.strip())


def _long(default: int, low: int = 0) -> ConfigSpec:
    return ConfigSpec(ConfigType.LONG, str(default), _integer(low, MAX_LONG))


def _int(default: int, low: int = 0, high: int = MAX_INT) -> ConfigSpec:
    return ConfigSpec(ConfigType.INT, str(default), _integer(low, high))


def _boolean(default: bool) -> ConfigSpec:
    return ConfigSpec(ConfigType.BOOLEAN, str(default).lower(), lambda value: value.lower() in ("true", "false"))


def config_specs(settings: BrokerSettings) -> dict[str, ConfigSpec]:
    """Every topic config by name, with this broker's defaults."""
    return {
        "cleanup.policy": ConfigSpec(ConfigType.LIST, "delete", _policies),
        "compression.gzip.level": _int(-1, low=-1, high=9),
        "compression.lz4.level": _int(9, low=1, high=17),
        "compression.type": ConfigSpec(
            ConfigType.STRING, "producer", _one_of("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
        ),
        "compression.zstd.level": _int(3, low=-131072, high=22),
        "delete.retention.ms": _long(24 * 3600 * 1000),
        "file.delete.delay.ms": _long(60_000),
        "flush.messages": _long(MAX_LONG, low=1),
        "flush.ms": _long(MAX_LONG),
        "follower.replication.throttled.replicas": ConfigSpec(ConfigType.LIST, "", lambda value: True),
        "index.interval.bytes": _int(4096),
        "leader.replication.throttled.replicas": ConfigSpec(ConfigType.LIST, "", lambda value: True),
        "local.retention.bytes": _long(-2, low=-2),
        "local.retention.ms": _long(-2, low=-2),
        "max.compaction.lag.ms": _long(MAX_LONG, low=1),
        "max.message.bytes": _int(settings.message_max_bytes),
        "message.timestamp.after.max.ms": _long(3_600_000),
        "message.timestamp.before.max.ms": _long(MAX_LONG),
        "message.timestamp.type": ConfigSpec(ConfigType.STRING, "CreateTime", _one_of("CreateTime", "LogAppendTime")),
        "min.cleanable.dirty.ratio": ConfigSpec(ConfigType.DOUBLE, "0.5", _number(0, 1)),
        "min.compaction.lag.ms": _long(0),
        "min.insync.replicas": _int(1, low=1),
        "preallocate": _boolean(False),
        "remote.log.copy.disable": _boolean(False),
        "remote.log.delete.on.disable": _boolean(False),
        "remote.storage.enable": ConfigSpec(ConfigType.BOOLEAN, "false", _one_of("false")),
        "retention.bytes": _long(-1, low=-1),
        "retention.ms": _long(settings.retention_ms, low=-1),
        # Apache Kafka takes no segment under 1 MB.
        "segment.bytes": _int(settings.segment_bytes, low=1 << 20),
        "segment.index.bytes": _int(10 << 20, low=4),
        "segment.jitter.ms": _long(0),
        "segment.ms": _long(WEEK_MS, low=1),
        "unclean.leader.election.enable": _boolean(False),
    }


def validated(specs: Mapping[str, ConfigSpec], values: Mapping[str, str | None]) -> dict[str, str]:
    """The values as given. Raises `KafkaError` (INVALID_CONFIG) naming the first that is unknown or unusable."""
    accepted = {}
    for name, value in values.items():
        spec = specs.get(name)
        if spec is None:
            raise KafkaError(ErrorCode.invalid_config, f"Unknown topic config name: {name}")
        if value is None:
            raise KafkaError(ErrorCode.invalid_config, f"Null value not supported for topic configs: {name}")
        try:
            fits = spec.check(value)
        except ValueError:
            fits = False
        if not fits:
            raise KafkaError(ErrorCode.invalid_config, f"Invalid value {value} for configuration {name}")
        accepted[name] = value
    return accepted


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configs a log acts on, parsed. Times are milliseconds; -1 is no limit."""

    compact: bool
    delete: bool
    append_time: bool
    max_message_bytes: int
    min_insync_replicas: int
    segment_bytes: int
    segment_ms: int
    retention_ms: int
    retention_bytes: int
    delete_retention_ms: int
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    min_cleanable_dirty_ratio: float
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int

    @classmethod
    def of(cls, specs: Mapping[str, ConfigSpec], values: Mapping[str, str]) -> "TopicConfig":
        def get(name: str) -> str:
            return values.get(name, specs[name].default)

        policies = {part.strip() for part in get("cleanup.policy").split(",")}
        return cls(
            compact="compact" in policies,
            delete="delete" in policies,
            append_time=get("message.timestamp.type") == "LogAppendTime",
            max_message_bytes=int(get("max.message.bytes")),
            min_insync_replicas=int(get("min.insync.replicas")),
            segment_bytes=int(get("segment.bytes")),
            segment_ms=int(get("segment.ms")),
            retention_ms=int(get("retention.ms")),
            retention_bytes=int(get("retention.bytes")),
            delete_retention_ms=int(get("delete.retention.ms")),
            min_compaction_lag_ms=int(get("min.compaction.lag.ms")),
            max_compaction_lag_ms=int(get("max.compaction.lag.ms")),
            min_cleanable_dirty_ratio=float(get("min.cleanable.dirty.ratio")),
            timestamp_before_max_ms=int(get("message.timestamp.before.max.ms")),
            timestamp_after_max_ms=int(get("message.timestamp.after.max.ms")),
        )
