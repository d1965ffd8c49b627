"""The gateway's settings: POLAR_GATEWAY_… in the environment, `gateway:` in the file."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from polar.schemas.ids import MAX_ID_LENGTH, id_problem
from polar.service.settings import PolarSettings, section_config

from .machine import Half


def default_node_id() -> str:
    """The machine's name, made fit for an id."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-._")
    return name[:MAX_ID_LENGTH] or "gateway"


class GatewaySettings(PolarSettings):
    section: ClassVar[str] = "gateway"
    model_config = section_config("gateway")

    node_id: str = Field(default_factory=default_node_id, description="This node's name; unset: the machine's.")
    stage: Half = Field(Half.ALL, description="all, or init and run as two processes on one machine.")
    init_slots: int = Field(4, ge=1, description="Boxes prepared at once.")
    ready_slots: int = Field(4, ge=0, description="Prepared boxes that may wait beyond the free RUN slots.")
    run_slots: int = Field(8, ge=1, description="Harnesses that run at once.")

    default_backend: str = Field("local", description="Runtime of tasks that name none.")
    backends: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Options of each runtime by its name, e.g. {local: {default_memory_mb: 2048}}; those of "
        "`local` are the fields of polar.runtime's LocalSettings.",
    )
    allow_unsafe_local: bool = Field(
        False, description="Let `local` run harnesses without a sandbox where none works. For agents that you trust."
    )
    box_root: Path | None = Field(
        None, description="Folder of the local boxes; unset: below the state folder. Not below what boxes may read."
    )

    proxy_address: str = Field("127.0.0.1:8100", description="host:port of the model proxy, as seen from this machine.")
    model_name: str = Field("policy", description="What harnesses call the model where the task names none.")
    token_margin_s: float = Field(
        60.0, ge=0, description="Seconds that a session's token outlives its agent's time: the start of the harness."
    )

    runtime_api_host: str = Field("127.0.0.1", description="Where the runtime API listens.")
    runtime_api_port: int = Field(8720, ge=0, le=65535, description="0: any free port.")
    runtime_api_url: str | None = Field(
        None, description="The runtime API as graders reach it; unset: http://<runtime_api_host>:<port>."
    )
    api_concurrency: int = Field(16, ge=1, description="Requests that the runtime API works on at once; more wait.")
    api_max_bytes: int = Field(64 << 20, ge=1, description="Largest body, file and output of one such request.")
    api_max_timeout_s: float = Field(4 * 3600.0, gt=0, description="Longest time a command of one request may take.")

    output_tail_bytes: int = Field(
        8192, ge=0, le=262_144, description="Last bytes of a harness's output kept in its report."
    )
    inline_instruction_bytes: int = Field(
        32_768,
        ge=0,
        le=120_000,
        description="Longest instruction also put into POLAR_INSTRUCTION; Linux allows 128 KiB.",
    )
    artifact_bytes: int = Field(32 << 20, ge=0, description="Largest file kept of a session.")
    artifacts_total_bytes: int = Field(128 << 20, ge=0, description="Largest sum of the files kept of a session.")
    artifacts_count: int = Field(200, ge=0, le=1000, description="Most files kept of a session.")
    collect_timeout_s: float = Field(60.0, gt=0, description="Seconds for keeping a session's files.")
    harness_log_bytes: int = Field(64 << 20, ge=0, description="Most of a harness's output written to its log.")

    upload_roots: list[Path] = Field(
        default_factory=list,
        description="Folders of this machine that tasks may copy from (`upload_file`, `upload_dir` with `source`).",
    )
    import_paths: list[str] = Field(
        default_factory=list, description="`module:Class` of outside harness adapters that tasks may use."
    )

    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between two signs of life.")
    reap_interval_s: float = Field(60.0, gt=0, description="Seconds between two looks for boxes that nobody owns.")
    drain_grace_s: float = Field(
        10.0, ge=0, description="Seconds that running harnesses get after SIGTERM; keep it below shutdown_grace_s."
    )
    report_backoff_max_s: float = Field(10.0, gt=0, description="Longest wait between tries to reach the broker.")

    @field_validator("node_id")
    @classmethod
    def _fit_for_a_key(cls, value: str) -> str:
        if reason := id_problem(value):
            raise ValueError(reason)
        return value

    @field_validator("proxy_address")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @property
    def door(self) -> tuple[str, int]:
        """Host and port of the proxy."""
        return split_address(self.proxy_address)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`; ValueError otherwise."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)
