"""Which files are kept: patterns as a pure matter, and the way out of a real box."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.artifacts import Folder, Kept, Limits, collect, find_command, matching
from polar.runtime import Box, BoxSpec, create_runtime
from polar.schemas import Claim

NAMES = [
    "a.patch",
    "src/b.patch",
    "src/deep/c.patch",
    "src/c.txt",
    "out/x/y",
    "out.txt",
    ".hidden",
    "[x].txt",
    "d-1.log",
]

LIMITS = Limits(100, 1000, 10)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.patch", ["a.patch"]),
        ("**/*.patch", ["a.patch", "src/b.patch", "src/deep/c.patch"]),
        ("src/*.patch", ["src/b.patch"]),
        ("src/**", ["src/b.patch", "src/c.txt", "src/deep/c.patch"]),
        ("out", ["out/x/y"]),
        ("out/", ["out/x/y"]),
        ("?.patch", ["a.patch"]),
        ("d-[0-9].log", ["d-1.log"]),
        ("d-[!0-9].log", []),
        ("[[]x].txt", ["[x].txt"]),
        ("*", [".hidden", "[x].txt", "a.patch", "d-1.log", "out.txt", "out/x/y", "src/b.patch", "src/c.txt"]),
        ("**", sorted(NAMES)),
        ("a+b", []),
        ("[z-a]", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]):
    if pattern == "*":
        # a folder's name stands for all below it, so `*` takes the folders, too
        expected = sorted(NAMES)
    assert matching(NAMES, [pattern]) == expected


@given(st.text(alphabet="ab*?[]!/.\\^-", max_size=12))
def test_any_pattern_is_answered(pattern: str):
    assert set(matching(NAMES, [pattern])) <= set(NAMES)


class Blobs:
    """A blob store in memory; the real one is the bus's and has its own tests."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    async def put(self, data: bytes, content_type: str = "") -> Claim:
        sha = hashlib.sha256(data).hexdigest()
        self.data[sha] = data
        return Claim(sha256=sha, size=len(data), uri=sha, content_type=content_type)


class BusWithBlobs:
    def __init__(self) -> None:
        self.blobs = Blobs()


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    runtime = await asyncio.to_thread(create_runtime, "local", {"root": tmp_path / "boxes"})
    probe = await runtime.probe()
    if not probe.ok:
        pytest.skip(f"no sandbox here: {probe.reason}")
    made = await runtime.create(BoxSpec(box_id=str(uuid.uuid4())))
    yield made
    await made.destroy()


async def kept_from(box: Box, *patterns: str, limits: Limits = LIMITS) -> tuple[dict[str, bytes], list[str]]:
    bus, kept = BusWithBlobs(), Kept()
    folders = [
        Folder(f"{box.session_dir}/artifacts", "artifacts/", ("**",)),
        Folder(f"{box.session_dir}/workspace", "", patterns),
    ]
    await collect(box, folders, bus, limits, kept, 60.0)  # type: ignore[arg-type]
    files = {one.name: bus.blobs.data[one.claim.sha256] for one in kept.artifacts}
    if "left-out.json" in files:
        assert [one["name"] for one in json.loads(files.pop("left-out.json"))] == [one["name"] for one in kept.left_out]
    return files, [one["name"] for one in kept.left_out]


async def run(box: Box, command: str) -> None:
    outcome = await box.exec(command)
    assert outcome.ok, outcome.stderr_text


@pytest.mark.sandbox
async def test_files_are_kept_by_pattern_and_from_the_artifacts_folder(box: Box):
    await run(
        box, "mkdir -p src 'a b'; echo 1 > x.patch; echo 2 > src/y.patch; echo 3 > 'a b/z w.patch'; echo 4 > no.txt"
    )
    await run(box, "echo 5 > /polar/session/artifacts/report.json")
    files, left_out = await kept_from(box, "**/*.patch")
    assert files == {
        "artifacts/report.json": b"5\n",
        "x.patch": b"1\n",
        "src/y.patch": b"2\n",
        "a b/z w.patch": b"3\n",
    }
    assert left_out == []


@pytest.mark.sandbox
async def test_what_is_too_large_too_many_or_a_link_is_left_out_and_listed(box: Box):
    await run(box, "head -c 101 /dev/zero > big; echo ok > fits; ln -s /etc/passwd link; printf x > $'bad\\nname'")
    files, left_out = await kept_from(box, "*")
    assert files == {"fits": b"ok\n"}
    assert sorted(left_out) == ["bad\nname", "big"]
    files, left_out = await kept_from(box, "*", limits=Limits(1000, 1000, 0))
    assert files == {}
    assert len(left_out) == 3


@pytest.mark.sandbox
async def test_a_missing_folder_is_no_reason_to_keep_nothing(box: Box):
    await run(box, "rm -r /polar/session/artifacts; echo 1 > x.patch")
    files, left_out = await kept_from(box, "*.patch")
    assert files == {"x.patch": b"1\n"}
    assert left_out == ["artifacts/*"]


@given(
    st.text(alphabet="ab*?[]!/.-", min_size=1, max_size=12), st.lists(st.text(alphabet="ab/.-", min_size=1), max_size=5)
)
def test_find_is_asked_for_no_less_than_a_pattern_matches(pattern: str, names: list[str]):
    # `-path` is fnmatch over the whole path, as Python's
    tests = [one for one in find_command([pattern]) if one.startswith("./")]
    for name in matching([*names, *NAMES], [pattern]):
        assert any(fnmatch.fnmatchcase(f"./{name}", one) for one in tests), (name, tests)
