"""Backends by name, their settings, and the choice between the two local ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from polar.runtime import BACKENDS, Backend, BackendNotAvailable, RuntimeUnavailable, SpecRefused, create_runtime
from polar.runtime.interface import BoxSpec
from polar.runtime.local import LocalRuntime, LocalSettings, UnsafeLocalRuntime, choose_local
from polar.runtime.local.bubblewrap import candidates, parse_version

BOX = BoxSpec(box_id="0194d2c0-0000-7000-8000-000000000001")


def test_importing_the_package_loads_no_backend():
    code = "import sys, polar.runtime; print([m for m in sys.modules if m.startswith('polar.runtime.local')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["docker", "apptainer"])
def test_known_backends_of_later_versions_say_so(name, tmp_path):
    with pytest.raises(BackendNotAvailable, match="not part of this version") as error:
        create_runtime(name, {"root": str(tmp_path)})
    assert not error.value.retryable
    assert "local" in error.value.hint


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendNotAvailable, match="apptainer, docker, local, local-unsafe"):
        create_runtime("podman", {})


def test_a_backend_of_ones_own(tmp_path):
    backends = {**BACKENDS, "mine": Backend("polar.runtime.local.runtime", "LocalRuntime")}
    assert create_runtime("mine", {"root": str(tmp_path)}, backends=backends).name == "local"
    with pytest.raises(BackendNotAvailable, match="no_such_module"):
        create_runtime("mine", {}, backends={"mine": Backend("no_such_module", "X")})


def test_plain_processes_need_permission(tmp_path):
    with pytest.raises(SpecRefused, match="allow_unsafe_local"):
        create_runtime("local-unsafe", {"root": str(tmp_path)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "root"),
        ({"root": "relative"}, "absolute"),
        ({"root": "/x", "rot": 1}, "rot"),
        ({"root": "/x", "door_port": "many"}, "door_port"),
        ({"root": "/x", "read_only": ["/"]}, "cannot be shown"),
        ({"root": "/x", "read_only": ["/etc"]}, "cannot be shown"),
        ({"root": "/x", "read_only": ["data"]}, "cannot be shown"),
        ({"root": "/srv/polar/boxes", "read_only": ["/srv/polar"]}, "every box can read"),
    ],
)
def test_wrong_settings_are_refused_with_a_reason(values, message):
    with pytest.raises(SpecRefused, match=message):
        LocalSettings.parse(values)


def test_settings_come_from_plain_values(tmp_path):
    values = {"root": tmp_path, "read_only": ["/opt/tools"], "path": ["/opt/tools/bin"], "default_pids": None}
    settings = LocalSettings.parse(values)
    assert settings.root == tmp_path
    assert settings.read_only == (Path("/opt/tools"),)
    assert settings.default_pids is None
    assert settings.search_path.split(":")[:2] == ["/opt/tools/bin", f"{sys.prefix}/bin"]


async def test_without_a_working_bubblewrap_the_reason_and_a_hint_are_given(tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'bubblewrap 0.9.0' && exit\necho 'no namespaces' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    for chosen, reason in ((tmp_path / "missing", "missing"), (broken, "no namespaces")):
        runtime = await asyncio.to_thread(LocalRuntime.configure, {"root": tmp_path / "boxes", "bwrap": chosen})
        probe = await runtime.probe()
        assert not probe.ok
        assert reason in probe.reason
        assert "allow_unsafe_local" in probe.hint
        with pytest.raises(RuntimeUnavailable, match=reason) as error:
            await runtime.create(BOX)
        assert error.value.retryable
    assert await runtime.boxes() == []


async def test_the_choice_falls_back_only_where_it_is_allowed(tmp_path):
    values = {"root": str(tmp_path), "bwrap": str(tmp_path / "missing")}
    runtime, probe = await choose_local(values)
    assert isinstance(runtime, LocalRuntime)
    assert not probe.ok
    runtime, probe = await choose_local({**values, "allow_unsafe_local": True})
    assert isinstance(runtime, UnsafeLocalRuntime)
    assert probe.ok
    assert "weaker" in probe.reason
    assert "missing" in probe.reason


def test_versions_and_candidates():
    assert parse_version("bubblewrap 0.11.0\n") == (0, 11, 0)
    assert parse_version("something else") == ()
    assert candidates(Path("/x/bwrap")) == ["/x/bwrap"]
    assert all(path.endswith("bwrap") for path in candidates(None))
