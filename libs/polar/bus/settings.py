"""Settings of everything that touches the log: POLAR_KAFKA_… in the environment, `kafka:` in the file."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator

from polar.schemas.topics import MAX_RECORD_BYTES, TopicSpec, topic
from polar.service.settings import CommonSettings, PolarSettings, section_config


def _default_blob_url() -> str:
    return (CommonSettings().state_dir.absolute() / "blobs").as_uri()


class BusSettings(PolarSettings):
    """Where the log is and how it is used. All processes of one installation must agree on the first group."""

    section: ClassVar[str] = "kafka"
    model_config = section_config("kafka")

    bootstrap: str = Field("127.0.0.1:9092", description="host:port of brokers, comma-separated.")
    topic_prefix: str = Field(
        "polar.", description="Before every topic name, group id and transactional id, so that tenants share a cluster."
    )
    partitions: int = Field(8, ge=1, description="N: partitions of the topics keyed by session or group.")
    task_partitions: int = Field(4, ge=1, description="Partitions of `tasks`.")
    node_partitions: int = Field(4, ge=1, description="Partitions of `assignments` and `ready`.")
    replication_factor: int = Field(
        1, ge=1, description="Copies of each partition when topics are created; 3 in production."
    )
    min_insync_replicas: int | None = Field(
        None, ge=1, description="min.insync.replicas of topics that are created; unset: the broker's default."
    )
    create_topics: bool = Field(True, description="Create missing topics at start.")
    max_record_bytes: int = Field(
        MAX_RECORD_BYTES, ge=4096, description="Largest record; applied to topics, producers and consumers."
    )
    blob_url: str = Field(
        default_factory=_default_blob_url,
        description="Store of parts too large for a record: file:///folder, s3://bucket/path, gs://…, az://…, memory:///.",
    )

    transaction_timeout_ms: int = Field(
        10_000,
        ge=1_000,
        description="After this the broker aborts an open transaction; a dead writer blocks readers so long.",
    )
    session_timeout_ms: int = Field(6_000, ge=1_000, description="After this a silent group member is dead.")
    connect_timeout_s: float = Field(15.0, gt=0, description="Seconds to find a broker before giving up.")
    request_timeout_s: float = Field(20.0, gt=0, description="Seconds for one answer of the broker.")
    delivery_timeout_s: float = Field(
        45.0, gt=0, description="Seconds for a record or a commit to be acknowledged, over retries and broker restarts."
    )
    lookup_timeout_s: float = Field(
        10.0, gt=0, description="Seconds to wait for a record whose transaction is not committed yet."
    )
    stuck_after_s: float = Field(
        15.0, gt=0, description="A reader that is behind and has not moved for so long gets a new consumer."
    )
    watchdog_s: float = Field(
        120.0,
        gt=0,
        description="A partition whose records wait while nothing of it is processed for so long is started anew; "
        "longer than the longest build.",
    )
    watchdog_restarts: int = Field(
        3,
        ge=0,
        description="How often in a row that is tried before the process ends with an error, for its supervisor.",
    )

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="How to talk to the brokers."
    )
    ssl_cafile: str | None = Field(None, description="CA certificates (PEM); unset: the system's.")
    ssl_certfile: str | None = Field(None, description="Client certificate (PEM).")
    ssl_keyfile: str | None = Field(None, description="Key of the client certificate (PEM).")
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field("PLAIN", description="With SASL_….")
    sasl_username: str | None = Field(None, description="With SASL_….")
    sasl_password: SecretStr | None = Field(None, description="With SASL_….")

    @model_validator(mode="after")
    def _consistent(self) -> BusSettings:
        if self.security_protocol.startswith("SASL") and (self.sasl_username is None or self.sasl_password is None):
            raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile goes with ssl_certfile")
        return self

    def count(self, spec: TopicSpec | str) -> int:
        """The number of partitions of a topic (a row of the table, or its name without prefix)."""
        row = topic(spec) if isinstance(spec, str) else spec
        return row.partitions if isinstance(row.partitions, int) else int(getattr(self, row.partitions))

    def full(self, name: str) -> str:
        """`name` with the prefix: a topic, a group or a transactional id as the broker knows it."""
        return f"{self.topic_prefix}{name}"
