"""Control groups: what is written for which limits, and where the node's own groups are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polar.runtime.local.cgroups import (
    Controllers,
    LimitGroups,
    Limits,
    detect,
    own_groups,
    settings_v1,
    settings_v2,
    sweep,
)

V1_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_OWN = "4:memory:/docker/abc/node\n2:cpu,cpuacct:/\n0::/\n"


def test_own_groups_of_version_1_and_a_mount_of_a_part():
    found = own_groups(V1_MOUNTS, V1_OWN)
    assert found["memory"] == Path("/sys/fs/cgroup/memory/node")
    assert found["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found[""] == Path("/sys/fs/cgroup/unified")


def test_own_group_of_version_2():
    mounts = "24 1 0:22 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    assert own_groups(mounts, "0::/system.slice/polar.service\n") == {
        "": Path("/sys/fs/cgroup/system.slice/polar.service")
    }


def test_what_is_written():
    limits = Limits(memory_mb=64, pids=10, cpus=0.5)
    assert settings_v1(limits) == {
        "memory": [("memory.limit_in_bytes", "67108864"), ("?memory.memsw.limit_in_bytes", "67108864")],
        "pids": [("pids.max", "10")],
        "cpu": [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "50000")],
    }
    assert settings_v2(limits) == {
        "memory": [("memory.max", "67108864"), ("?memory.swap.max", "0")],
        "pids": [("pids.max", "10")],
        "cpu": [("cpu.max", "50000 100000")],
    }
    assert settings_v1(Limits()) == settings_v2(Limits()) == {}
    assert not Limits()
    assert Limits(pids=0)


def test_a_plain_folder_is_not_mistaken_for_a_group(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("")
    assert detect(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cgroup.subtree_control"]


def test_version_2_groups_share_one_folder_and_count_kills(tmp_path):
    controllers = Controllers(2, {"memory": tmp_path, "pids": tmp_path})
    group = tmp_path / "polar-b"
    group.mkdir()
    for name in ("memory.max", "pids.max", "cgroup.procs"):
        (group / name).write_text("")
    (group / "memory.events").write_text("low 0\nmax 7\noom 2\noom_kill 2\n")
    groups = LimitGroups.make(controllers, "b", Limits(memory_mb=1, pids=5, cpus=1.0))
    assert groups.paths == (group,) == tuple(controllers.plan("b", Limits(pids=5)))
    assert (group / "memory.max").read_text() == "1048576"  # no memory.swap.max here: a kernel without swap
    assert (group / "pids.max").read_text() == "5"
    assert groups.oom_kills() == 2
    groups.enter(17)
    assert groups.members() == [17]


def test_a_group_without_its_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        LimitGroups.make(Controllers(2, {"pids": tmp_path}), "b", Limits(pids=5))


def test_only_old_and_empty_groups_are_swept(tmp_path):
    for name in ("polar-old", "polar-busy", "polar-new", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "polar-busy" / "child").mkdir()
    for name in ("polar-old", "polar-busy", "other"):
        os.utime(tmp_path / name, (0, 0))
    sweep(Controllers(1, {"memory": tmp_path, "pids": tmp_path}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "polar-busy", "polar-new"]
