"""Strategies by name: built in, of one's own by an installed entry point, and only where the operator allows it."""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polar.builder import rebuild
from polar.builder.registry import BUILT_IN, UnknownStrategy, load
from polar.schemas import BuilderSpec, Status
from tests.builder.toy import Session, say, user

NAME = "polar_test_strategy"
MODULE = '''
from polar.builder.assembly import Chain, Link
from polar.builder.config import TrainConfig, parse


class Last:
    """Only the last reply trains."""

    version = "own-1"

    def __init__(self, spec):
        self.config = parse(spec, TrainConfig)

    def chains(self, material):
        from polar.schemas import SetAside

        *others, last = material.samples
        left = [SetAside(completion_id=one.completion.completion_id, reason="not_last", attempt=1) for one in others]
        return [Chain([Link(last)])], left
'''


def wheel(folder: Path) -> Path:
    """A distribution that offers a builder, as a build tool packs it."""
    path = folder / f"{NAME}-1.0-py3-none-any.whl"
    info = f"{NAME}-1.0.dist-info"
    files = {
        f"{NAME}.py": MODULE,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[polar.builders]\nlast_only = {NAME}:Last\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a strategy that an installed package offers."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel(tmp_path)) as archive:
        archive.extractall(site)  # what an installer does with a pure wheel
    monkeypatch.syspath_prepend(str(site))
    return "last_only"


def session(strategy: str) -> Session:
    found = Session(builder=BuilderSpec(strategy=strategy))
    chance = random.Random(0)
    first = say("ab", chance)
    found.call([user("a")], first)
    found.call([user("a"), first.message, user("b")], say("c", chance))
    found.close()
    return found


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_built_in_needs_no_permission(name: str) -> None:
    trajectory = rebuild(session(name).records)
    assert trajectory.error is None
    assert trajectory.builder_version.endswith(load(name).version)


def test_an_installed_entry_point_builds_where_it_is_allowed(installed: str) -> None:
    trajectory = rebuild(session(installed).records, allowed={installed})
    assert trajectory.error is None, trajectory.error
    assert [turn.completion_id for trace in trajectory.traces for turn in trace.turns] == ["s-1-c1"]
    assert [(one.completion_id, one.reason) for one in trajectory.set_aside] == [("s-1-c0", "not_last")]
    assert trajectory.builder_version.endswith(".own-1")


def test_an_installed_entry_point_is_refused_where_it_is_not_allowed(installed: str) -> None:
    trajectory = rebuild(session(installed).records)
    assert trajectory.status is Status.ERROR
    assert trajectory.error is not None
    assert "POLAR_BUILDER_ALLOW" in trajectory.error.message
    assert [one.reason for one in trajectory.set_aside] == ["not_built", "not_built"]


def test_an_allowed_name_that_nothing_offers_says_so() -> None:
    with pytest.raises(UnknownStrategy, match="no installed package offers it"):
        load("gone", {"gone"})


def test_a_module_and_class_may_be_named(installed: str) -> None:
    name = f"{NAME}:Last"
    assert load(name, {name}).version == "own-1"
    with pytest.raises(UnknownStrategy):
        load(name)


def test_the_same_holds_in_a_process_of_its_own(installed: str, tmp_path: Path) -> None:
    """Nothing of the test process helps: the entry point is found by the installed metadata alone."""
    code = "from polar.builder.registry import load; print(load('last_only', {'last_only'}).version)"
    paths = [str(tmp_path / "site"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "own-1", done.stderr
