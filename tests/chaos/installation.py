"""An installation to be broken: two submits, two gateways, one of each other service, all on one broker.

Every process has its own name, state folder and port, as on machines of its own; they share secret and blobs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.stack import Stack, free_port

SUBMITS = ("submit-a", "submit-b")
GATEWAYS = ("gateway-a", "gateway-b")
OTHERS = ("proxy", "builder", "evaluator")


class Installation(Stack):
    """A `Stack` whose processes are started by what they are."""

    def __init__(
        self, root: Path, bootstrap: str, engine_url: str, *, prefix: str, env: Mapping[str, str] | None = None
    ) -> None:
        shared = {
            "POLAR_TOKEN_SECRET": secrets.token_hex(32),
            "POLAR_KAFKA_BLOB_URL": (root / "state" / "blobs").as_uri(),
            # a process that starts while the broker is away waits for it, as its supervisor would have it
            "POLAR_KAFKA_CONNECT_TIMEOUT_S": "120",
            "POLAR_SCHEDULER_LEADER_SILENCE": "2",
        }
        super().__init__(root, bootstrap, engine_url, prefix=prefix, env={**shared, **(env or {})})
        self._submit_ports = {SUBMITS[0]: self.submit_port}

    def start_submit(self, name: str) -> None:
        port = self._submit_ports.setdefault(name, free_port())
        self.start(name, "submit", env={**self.own(name), "POLAR_SUBMIT_PORT": str(port)})

    def start_gateway(self, name: str, **env: str) -> None:
        own = {"POLAR_GATEWAY_NODE_ID": name, "POLAR_GATEWAY_RUNTIME_API_PORT": str(free_port())}
        self.start(name, "gateway", env={**self.own(name), **own, **env})

    def start_all(self) -> None:
        for name in SUBMITS:
            self.start_submit(name)
        for name in GATEWAYS:
            self.start_gateway(name)
        for name in OTHERS:
            self.start(name)

    def own(self, name: str) -> dict[str, str]:
        """The variables of a process that shares no state folder."""
        return {"POLAR_STATE_DIR": str(self.root / "state" / name)}

    def leader(self) -> str | None:
        """The submit that was the last to begin leading, by the logs; None: none has begun."""
        began = {name: times[-1] for name in SUBMITS if (times := self.times(name, "leading"))}
        return max(began, key=lambda name: began[name]) if began else None

    def times(self, name: str, event: str) -> list[str]:
        """When a process logged an event, in ISO 8601: those sort as they come."""
        path = self.root / f"{name}.log"
        found = []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            if event in line and line.startswith("{"):
                entry = json.loads(line)
                if entry["event"] == event:
                    found.append(entry["timestamp"])
        return found

    def lines(self, name: str) -> int:
        """How many lines a process has logged."""
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace").count("\n") if path.exists() else 0
