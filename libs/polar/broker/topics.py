"""Topics: their names, ids, partitions and configs, and the logs behind them.

Promises: a topic that was created is found again after any stop; a deleted one is gone, and another of the same
name shares nothing with it (its own id, its own directory). Creation on use does not exist. Knows nothing of the
wire: errors are `KafkaError` with the codes Apache Kafka gives.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

from polar.broker.configs import ConfigSpec, TopicConfig, config_specs, validated
from polar.broker.database import Database
from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.files import FilePool
from polar.broker.ledger import LogLedger
from polar.broker.log import PartitionLog
from polar.broker.settings import BrokerSettings

__all__ = ["Topic", "Topics", "check_topic_name"]

logger = logging.getLogger(__name__)

DELETED = ".deleted"
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def check_topic_name(name: str) -> None:
    """Raises `KafkaError` (INVALID_TOPIC_EXCEPTION)."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise KafkaError(
            ErrorCode.invalid_topic_exception,
            f"Topic name is invalid: '{name[:260]}' has to be 1 to 249 of the characters a-z A-Z 0-9 . _ -",
        )


@dataclass(slots=True)
class Topic:
    name: str
    id: UUID
    configs: dict[str, str]
    """Only what was set; everything else has the default of `Topics.specs`."""
    config: TopicConfig
    logs: list[PartitionLog] = field(default_factory=list)

    @property
    def directory_name(self) -> str:
        return f"{self.name}.{self.id.hex[:12]}"


class Topics:
    """All topics of the broker. `clock` gives Unix milliseconds."""

    def __init__(self, settings: BrokerSettings, database: Database, clock: Callable[[], int]) -> None:
        self.specs: dict[str, ConfigSpec] = config_specs(settings)
        self._settings = settings
        self._database = database
        self._clock = clock
        self._root = settings.directory / "logs"
        self._files = FilePool(settings.max_open_files)
        self._topics: dict[str, Topic] = {}

    def load(self) -> None:
        """Read every topic back; takes as long as the unclean part of the logs is large."""
        self._root.mkdir(parents=True, exist_ok=True)
        rows = self._database.query("SELECT name, id, partitions FROM topics")
        expected = set()
        for name, raw_id, partitions in rows:
            configs = dict(self._database.query("SELECT name, value FROM topic_configs WHERE topic_id=?", (raw_id,)))
            topic = Topic(name, UUID(bytes=raw_id), configs, TopicConfig.of(self.specs, configs))
            if (self._root / (topic.directory_name + DELETED)).exists():
                self._forget(topic, partitions)
                continue
            expected.add(topic.directory_name)
            self._add_logs(topic, partitions)
            self._topics[name] = topic
        for entry in os.listdir(self._root):
            if entry not in expected and not entry.endswith(DELETED):
                logger.warning("%s holds no topic the broker knows; it is left alone", self._root / entry)

    def garbage(self) -> list[Path]:
        """Directories of deleted topics, for a worker thread to remove."""
        return [self._root / entry for entry in os.listdir(self._root) if entry.endswith(DELETED)]

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    def __len__(self) -> int:
        return len(self._topics)

    def logs(self) -> Iterator[PartitionLog]:
        for topic in self:
            yield from topic.logs

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        return next((topic for topic in self._topics.values() if topic.id == topic_id), None)

    def log(self, name: str, partition: int) -> PartitionLog:
        """Raises `KafkaError` (UNKNOWN_TOPIC_OR_PARTITION)."""
        topic = self._topics.get(name)
        if topic is None or not 0 <= partition < len(topic.logs):
            raise KafkaError(ErrorCode.unknown_topic_or_partition)
        return topic.logs[partition]

    def create(
        self, name: str, partitions: int, configs: Mapping[str, str | None], *, validate_only: bool = False
    ) -> Topic:
        """A new topic; `partitions` -1 takes the broker's default.

        Raises `KafkaError`: INVALID_TOPIC_EXCEPTION, TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS, INVALID_CONFIG,
        POLICY_VIOLATION over the limit of partitions.
        """
        self._check_name(name)
        if partitions == -1:
            partitions = self._settings.default_partitions
        if partitions <= 0:
            raise KafkaError(ErrorCode.invalid_partitions, "Number of partitions must be larger than 0.")
        self._check_room(partitions)
        accepted = validated(self.specs, configs)
        topic = Topic(name, uuid4(), accepted, TopicConfig.of(self.specs, accepted))
        if validate_only:
            return topic
        with self._database.transaction():
            self._database.execute("INSERT INTO topics VALUES (?, ?, ?)", (name, topic.id.bytes, partitions))
            self._write_configs(topic)
        self._add_logs(topic, partitions)
        self._topics[name] = topic
        return topic

    def add_partitions(self, name: str, count: int, *, validate_only: bool = False) -> None:
        """Grow a topic to `count` partitions. Raises `KafkaError` (INVALID_PARTITIONS when it would not grow)."""
        topic = self._existing(name)
        have = len(topic.logs)
        if count <= have:
            raise KafkaError(
                ErrorCode.invalid_partitions,
                f"The topic {name} currently has {have} partition(s); {count} would not be an increase.",
            )
        self._check_room(count - have)
        if validate_only:
            return
        self._database.execute("UPDATE topics SET partitions=? WHERE name=?", (count, name))
        self._add_logs(topic, count)

    def set_configs(self, name: str, configs: Mapping[str, str | None], *, validate_only: bool = False) -> None:
        """Replace all configs of a topic, as AlterConfigs does."""
        topic = self._existing(name)
        accepted = validated(self.specs, configs)
        config = TopicConfig.of(self.specs, accepted)
        if validate_only:
            return
        topic.configs, topic.config = accepted, config
        for log in topic.logs:
            log.config = config
        with self._database.transaction():
            self._database.execute("DELETE FROM topic_configs WHERE topic_id=?", (topic.id.bytes,))
            self._write_configs(topic)

    def delete(self, name: str) -> Path:
        """Remove a topic; returns the directory for a worker thread to delete."""
        topic = self._existing(name)
        del self._topics[name]
        for log in topic.logs:
            log.close()
        directory = self._root / topic.directory_name
        # The rename is the point of no return: a start after a kill in between finishes the deletion.
        gone = directory.rename(directory.with_name(directory.name + DELETED))
        self._forget(topic, len(topic.logs))
        return gone

    def save(self) -> None:
        """Note every log in the database, before a clean stop."""
        with self._database.transaction():
            for log in self.logs():
                log.save()

    def close(self) -> None:
        for log in self.logs():
            log.close()
        self._files.close_all()

    def _existing(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"The topic '{name}' does not exist.")
        return topic

    def _check_name(self, name: str) -> None:
        check_topic_name(name)
        if name in self._topics:
            raise KafkaError(ErrorCode.topic_already_exists, f"Topic '{name}' already exists.")
        flat = name.replace(".", "_")
        clash = next((other for other in self._topics if other.replace(".", "_") == flat), None)
        if clash is not None:
            raise KafkaError(ErrorCode.invalid_topic_exception, f"Topic '{name}' collides with existing topic: {clash}")

    def _check_room(self, partitions: int) -> None:
        have = sum(len(topic.logs) for topic in self._topics.values())
        if have + partitions > self._settings.max_partitions:
            raise KafkaError(
                ErrorCode.policy_violation,
                f"{have} partitions and {partitions} more are over the broker's limit of "
                f"{self._settings.max_partitions} (max_partitions)",
            )

    def _add_logs(self, topic: Topic, partitions: int) -> None:
        for partition in range(len(topic.logs), partitions):
            topic.logs.append(
                PartitionLog(
                    topic.name,
                    partition,
                    self._root / topic.directory_name / f"{partition:05d}",
                    topic.config,
                    LogLedger(self._database, topic.id, partition),
                    self._files,
                    self._clock,
                    fsync=self._settings.fsync,
                )
            )

    def _write_configs(self, topic: Topic) -> None:
        self._database.execute_many(
            "INSERT INTO topic_configs VALUES (?, ?, ?)",
            [(topic.id.bytes, name, value) for name, value in topic.configs.items()],
        )

    def _forget(self, topic: Topic, partitions: int) -> None:
        with self._database.transaction():
            self._database.execute("DELETE FROM topics WHERE id=?", (topic.id.bytes,))
            self._database.execute("DELETE FROM topic_configs WHERE topic_id=?", (topic.id.bytes,))
            for partition in range(partitions):
                LogLedger(self._database, topic.id, partition).forget()
            self._database.execute("DELETE FROM offsets WHERE topic=?", (topic.name,))
            self._database.execute("DELETE FROM pending_offsets WHERE topic=?", (topic.name,))
