"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar.bus import BusSettings


class Polar:
    """`polar` as a process, at the test's broker and topics."""

    def __init__(self, settings: BusSettings, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")} | {
            "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
            "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
            "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
            "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
            "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
            "POLAR_KAFKA_BLOB_URL": settings.blob_url,
            "POLAR_STATE_DIR": str(folder / "state"),
        }

    def __call__(self, *arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; `more`: variables."""
        return subprocess.run(
            [sys.executable, "-m", "polar.cli.main", *arguments],
            env={**self.env, **more},
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "polar.cli.main", *arguments],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of the test, and a current folder of its own."""
    for name in list(os.environ):
        if name.startswith("POLAR_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("POLAR_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("POLAR_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    monkeypatch.setenv("POLAR_KAFKA_CONNECT_TIMEOUT_S", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def polar(bus_settings: BusSettings, tmp_path: Path) -> Polar:
    return Polar(bus_settings, tmp_path)
