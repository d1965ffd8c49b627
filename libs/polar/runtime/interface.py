"""What a runtime is: boxes in which one session's commands run, apart from the machine and from each other.

Promises that every backend keeps (`tests/runtime/test_conformance.py` holds them against each):

- A command's timeout or the cancellation of `Box.exec` kills every process that the command started, and the call
  returns only when they are dead. An agent whose time is up makes no further model call.
- `kill_all` returns when nothing of the box runs any more, also after a restart of the node process.
- Files go in and out below the box's own folders only; a link planted by the agent is refused, not followed.
- What a box cannot enforce is said in `Capabilities`, never silently ignored.

This module knows nothing of sessions' meaning, of Kafka or of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Network = Literal["proxy-only", "none", "host"]

DEFAULT_OUTPUT_LIMIT = 1 << 20  # bytes kept of each stream: the end of a test run, not its whole story
DEFAULT_LOG_LIMIT = 64 << 20  # bytes written to a log file
DEFAULT_READ_LIMIT = 16 << 20  # bytes of one file read into memory
DEFAULT_DOWNLOAD_LIMIT = 256 << 20  # bytes of one download


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """What a box shall be. `None` means: the backend's default, which may be no limit.

    `box_id` is a UUID's text. `image` names a root file system for backends that have images. `workdir` is an
    absolute path in the box, made if it is missing; None: `<session_dir>/workspace`. `env` is seen by every command.
    `cpus` are cores, `memory_mb` and `storage_mb` MiB for the whole box. `labels` find boxes again: a gateway sets
    node, session and attempt. `kwargs` are options of one backend; an unknown one is refused.
    """

    box_id: str
    image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory_mb: int | None = None
    pids: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    network: Network = "proxy-only"
    labels: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Door:
    """The one address that a proxy-only box reaches: where the model proxy listens, as seen by the node process."""

    host_address: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend really enforces on this machine. False means: a request for it has no, or only a partial, effect.

    `survives_restart`: boxes and their files outlive the node process (running commands never do).
    `kills_detached`: processes that left their session and process group die as well.
    `shared_loopback`: a server started by one exec is reached by another exec of the same box.
    """

    isolated_filesystem: bool = False
    proxy_only_network: bool = False
    no_network: bool = False
    host_network: bool = False
    limits_memory: bool = False
    limits_pids: bool = False
    limits_cpus: bool = False
    limits_storage: bool = False
    survives_restart: bool = False
    kills_detached: bool = False
    shared_loopback: bool = False
    images: bool = False
    gpus: bool = False


@dataclass(frozen=True)
class Probe:
    """The answer of a trial run. `reason`: why it cannot work, or what is weaker; `hint`: what to change."""

    ok: bool
    reason: str
    hint: str
    capabilities: Capabilities


@dataclass(frozen=True)
class BoxInfo:
    """A box that exists on this machine. `created` is seconds since 1970."""

    box_id: str
    labels: Mapping[str, str]
    created: float


@dataclass(frozen=True, kw_only=True)
class ExecOutcome:
    """How a command ended.

    `return_code` is None where the command was killed by the runtime: `timed_out` says whether by its own timeout,
    else by `kill_all` or `destroy`. A command that died of signal N has 128+N. `stdout` and `stderr` are the last
    bytes of each stream, `truncated` says that earlier ones are missing, `log_truncated` that the log file is cut.
    `duration_s` counts from the start of the command to the death of its last process. `oom_killed`: the kernel
    killed a process of this box for its memory limit meanwhile (exact for one command at a time). `door_lost`: the
    command's connections through the door that found no proxy, or lost it before its answer began; 0 also where a
    backend cannot tell.
    """

    return_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    log_truncated: bool = False
    duration_s: float = 0.0
    oom_killed: bool = False
    door_lost: int = 0

    @property
    def ok(self) -> bool:
        return self.return_code == 0

    @property
    def stdout_text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class Download:
    """What a download brought: counts, and the box paths left out (links, sockets, devices)."""

    files: int
    size: int
    skipped: tuple[str, ...] = ()


@runtime_checkable
class Box(Protocol):
    """One session's place. All paths named `target`, `source` or `path` as text are absolute paths in the box."""

    @property
    def box_id(self) -> str: ...

    @property
    def spec(self) -> BoxSpec: ...

    @property
    def door_url(self) -> str | None:
        """The proxy's base URL as commands in the box reach it, such as `http://127.0.0.1:8700`; None without one."""

    @property
    def session_dir(self) -> str:
        """The session folder as commands see it: `/polar/session`, with `workspace`, `artifacts` and `logs` in it."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
        network: Literal["none"] | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        log_file: Path | None = None,
        log_limit: int = DEFAULT_LOG_LIMIT,
    ) -> ExecOutcome:
        """Run one command; text is run by the box's shell, a sequence as it stands.

        When the command ends, whatever it left running in the background is killed. `timeout` is in seconds from the
        start of the command. `log_file` is a path of the host to which both streams are appended, mixed by lines.
        Raises BoxGone, BoxStartFailed, SpecRefused (impossible words or variables), PathRefused (log file).
        """

    async def kill_all(self) -> None:
        """Kill every process of the box; nothing of it runs when this returns."""

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file to the path `target`, or a host folder's content into the folder `target`.

        Raises BoxGone, PathRefused, TransferFailed.
        """

    async def download(self, source: str, target: Path, max_bytes: int = DEFAULT_DOWNLOAD_LIMIT) -> Download:
        """Copy a file, or a folder's content, out of the box. Links are left out and listed.

        Raises BoxGone, PathRefused, TooLarge (what was copied until then is left), TransferFailed.
        """

    async def read_file(self, path: str, max_bytes: int = DEFAULT_READ_LIMIT) -> bytes:
        """Raises BoxGone, PathRefused, TooLarge, TransferFailed (also where there is no such file)."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its parent folders. Raises BoxGone, PathRefused, TransferFailed."""

    async def destroy(self) -> None:
        """Kill everything and delete the box. A second call does nothing."""


@runtime_checkable
class Runtime(Protocol):
    """A way to make boxes on this machine."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities:
        """What is enforced here; exact after the first `probe` or `create`."""

    async def probe(self) -> Probe:
        """Run something for real; say whether and how well the backend works here. "It does not" is an answer."""

    async def create(self, spec: BoxSpec, door: Door | None = None) -> Box:
        """Raises RuntimeUnavailable, SpecRefused, BoxStartFailed."""

    async def attach(self, box_id: str, door: Door | None = None) -> Box | None:
        """The box of that id, or None. `door` replaces the stored one, for a proxy that has moved."""

    async def boxes(self, **labels: str) -> list[BoxInfo]:
        """The boxes on this machine that bear all these labels, whoever made them."""
