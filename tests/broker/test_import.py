"""What importing the broker does to the process and the folder it is imported in."""

import os
import subprocess
import sys
from pathlib import Path


def imported(folder: Path, program: str) -> str:
    """What a new Python, in a folder of its own, prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("HYPOTHESIS")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_importing_the_broker_writes_nothing_into_the_working_folder(tmp_path: Path) -> None:
    assert imported(tmp_path, "import sys, polar.broker.server; print('hypothesis' in sys.modules)") == "False"
    assert list(tmp_path.iterdir()) == []


def test_hypothesis_works_before_and_after_the_broker_was_imported(tmp_path: Path) -> None:
    for order in ("import hypothesis, polar.broker.server", "import polar.broker.server, hypothesis"):
        assert imported(tmp_path, f"{order}; print(hypothesis.strategies.__name__)") == "hypothesis.strategies"
